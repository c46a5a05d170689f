"""A sandbox as its agent's client: the `Sandbox` calls as frames over a socket that does not block.

Between calls nothing here belongs to an event loop, so a session may be opened in one and used in the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import (
    DEFAULT_TIMEOUT,
    MAX_FILE,
    MAX_OUTPUT,
    WORK,
    ExecResult,
    FileAccessError,
    PythonResult,
)
from agent_rl.sandboxes.inside.wire import CHUNK, FrameError, Frames, Head, pack

FILE_TIMEOUT = 30.0
"""Seconds that a file may take to be read or written."""
PATIENCE = 15.0
"""Seconds that an answer may be late: the agent ends what is over time itself, which can take it a while."""


class Session:
    """An open sandbox whose agent is at the other end of a socket."""

    def __init__(
        self,
        stream: socket.socket,
        end: Callable[[Session], Awaitable[None]],
        decode: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """Take the socket over.

        Args:
            stream: to the agent; it must not block.
            end: ends the sandbox and everything in it; called once.
            decode: turns what arrives into the bytes that the agent sent.
        """
        self._stream, self._end, self._decode = stream, end, decode
        self._frames = Frames()
        self._turn, self._sending = asyncio.Lock(), asyncio.Lock()
        self._last = 0
        self._lost: str | None = None
        self._ended = False

    async def greet(self, greeting: bytes, timeout: float) -> None:
        """Send what starts the agent, and wait until it says that it is there.

        Raises:
            SandboxError: if it doesn't; the sandbox was ended then.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._send(greeting)
                head, _ = await self._receive()
        except TimeoutError:
            raise await self._broken(f"its agent did not answer within {timeout:g} s") from None
        if "ready" not in head:
            raise await self._broken(f"its agent began with {head!r:.200}")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """As in `Sandbox`."""
        if isinstance(argv, str) or not argv:
            raise ConfigError(f"argv={argv!r}: give a program and its arguments, such as ['ls', '-l']")
        what: Head = {"op": "exec", "argv": list(argv), "cwd": cwd, "env": dict(env or {})}
        answer, output, seconds = await self._call(what, input, timeout, max_output)
        out, err = _split(answer, output)
        code, expired, cut = int(str(answer["code"])), bool(answer["expired"]), bool(answer["cut"])
        return ExecResult(code, out, err, timed_out=expired, truncated=cut, seconds=seconds)

    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        """As in `Sandbox`."""
        source = code.encode(errors="surrogatepass")
        answer, output, seconds = await self._call({"op": "python"}, source, timeout, max_output)
        out, err = _split(answer, output)
        return PythonResult(
            out,
            err,
            value=cast("str | None", answer["value"]),
            error=cast("str | None", answer["error"]),
            timed_out=bool(answer["expired"]),
            truncated=bool(answer["cut"]),
            state_lost=bool(answer["lost"]),
            seconds=seconds,
        )

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """As in `Sandbox`."""
        answer, data, _ = await self._call({"op": "read", "path": path}, b"", FILE_TIMEOUT, max_bytes)
        if answer["problem"] is not None:
            raise FileAccessError(str(answer["problem"]))
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        """As in `Sandbox`."""
        if len(data) > MAX_FILE:
            raise FileAccessError(f"{path}: {len(data)} bytes are to be written; at most {MAX_FILE} are")
        answer, _, _ = await self._call({"op": "write", "path": path}, data, FILE_TIMEOUT, MAX_OUTPUT)
        if answer["problem"] is not None:
            raise FileAccessError(str(answer["problem"]))

    async def close(self) -> None:
        """As in `Sandbox`."""
        self._lost = self._lost or "it was closed"
        if not self._ended:
            self._ended = True
            self._stream.close()
            await self._end(self)

    async def _call(self, head: Head, body: bytes, timeout: float, keep: int) -> tuple[Head, bytes, float]:
        """Ask the agent, and wait for its answer; a call that is cancelled is ended inside, too."""
        if not timeout > 0 or keep < 0:
            raise ConfigError(f"timeout={timeout}, at most {keep} bytes: give a positive time and no negative size")
        async with self._turn:
            if self._lost is not None:
                raise SandboxError(f"the sandbox is gone: {self._lost}")
            self._last = call = self._last + 1
            frame = pack({**head, "id": call, "timeout": timeout, "keep": keep}, body)
            began = time.perf_counter()
            exchange = asyncio.ensure_future(self._exchange(call, frame))
            try:
                async with asyncio.timeout(timeout + PATIENCE):
                    answer, output = await asyncio.shield(exchange)
            except TimeoutError:
                exchange.cancel()
                raise await self._broken(f"no answer {PATIENCE:g} s after the timeout of {timeout:g} s") from None
            except asyncio.CancelledError:
                await self._cancel(call, exchange)
                raise
            if "failed" in answer:
                raise await self._broken(str(answer["failed"]))
            return answer, output, time.perf_counter() - began

    async def _exchange(self, call: int, frame: bytes) -> tuple[Head, bytes]:
        await self._send(frame)
        while True:
            head, body = await self._receive()
            if head.get("id") == call:  # an earlier call's would be one that was given up
                return head, body

    async def _cancel(self, call: int, exchange: asyncio.Future[tuple[Head, bytes]]) -> None:
        """End a call inside; if that fails, or there is no time for it, end the sandbox."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._send(pack({"op": "cancel", "id": call}))
                await asyncio.shield(exchange)
        except BaseException as error:
            exchange.cancel()
            await asyncio.shield(self._broken(f"a cancelled call could not be ended: {error!r}"))
            if not isinstance(error, Exception):
                raise

    async def _send(self, frame: bytes) -> None:
        try:
            async with self._sending:  # a cancellation may come while its call is still on the way
                await asyncio.get_running_loop().sock_sendall(self._stream, frame)
        except OSError as error:
            raise await self._broken(f"its stream broke: {error}") from error

    async def _receive(self) -> tuple[Head, bytes]:
        """Return the next frame."""
        loop = asyncio.get_running_loop()
        try:
            while (frame := self._frames.pop()) is None:
                data = await loop.sock_recv(self._stream, CHUNK)
                if not data:
                    raise await self._broken("its agent ended")
                self._frames.feed(self._decode(data))
        except (OSError, FrameError) as error:
            raise await self._broken(f"its stream broke: {error}") from error
        return frame

    async def _broken(self, why: str) -> SandboxError:
        """End the sandbox; return what to raise."""
        self._lost = self._lost or why
        with contextlib.suppress(SandboxError):
            await self.close()
        return SandboxError(f"the sandbox was lost: {self._lost}")


def _split(answer: Head, output: bytes) -> tuple[str, str]:
    """Return stdout and stderr."""
    out = int(str(answer["out"]))
    return output[:out].decode(errors="backslashreplace"), output[out:].decode(errors="backslashreplace")
