"""A sandbox on a server, with its processes and streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from agent_rl.concurrency import LoopLock
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import ConfigError, RemoteError, SandboxError
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.call_clock import counted
from agent_rl.sandboxes.calls import (
    DEFAULT_TIMEOUT,
    MAX_FILE,
    MAX_OUTPUT,
    Command,
    ExecResult,
    FileAccessError,
    PythonResult,
    check_call,
)
from agent_rl.sandboxes.process import MAX_LOG, MAX_READ, READ_TIMEOUT, Launch, Logs, Output, Process, Stream, check_pty
from agent_rl.sandboxes.remote import packing, wire
from agent_rl.sandboxes.remote.wire import Reply
from agent_rl.sandboxes.snapshot import Snapshot
from agent_rl.serving.frames import FrameSizeError, part
from agent_rl.serving.link import Link, next_call

PIECE = 1024 * 1024
"""Bytes of a stream that one request writes."""
T = TypeVar("T")
R = TypeVar("R", ExecResult, PythonResult)


class RemoteSandbox(Sandbox):
    """A sandbox on a server.

    Args:
        link: the connection on which it was opened; it ends with that.
        lease: its name there.
        told: hears every reply, for the counts of places in it.
    """

    def __init__(self, link: Link[Reply], lease: str, told: Callable[[Reply], None]) -> None:
        self._link, self._lease, self._told = link, lease, told
        self._loss: SandboxLoss | None = None
        self._is_closed = False
        self._abandon = weakref.finalize(self, give_back, link, lease)
        self._abandon.atexit = False  # the connection ends then, and the lease with it

    def __repr__(self) -> str:
        return f"RemoteSandbox({self._lease!r}, {self._link.connection.url})"

    @property
    def loss(self) -> SandboxLoss | None:
        """How the sandbox was lost, once a call has found out."""
        return self._loss

    def refuse_users(self) -> str | None:
        """Return nothing: the sandbox on the server says."""
        return None

    async def run_command(self, command: Command) -> ExecResult:
        """Run a command to its end."""
        _check_size("input", command.input)
        reply = await self.ask(wire.RunCommand(op="run_command", call=next_call(), lease=self._lease, command=command))
        return _with_texts(self.part(reply.executed), reply)

    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        """Run code in the sandbox's interpreter, which keeps its variables from call to call."""
        check_call(timeout, max_output)
        source = packing.pack_code(code)
        _check_size("code", source)
        request = wire.RunPython(
            op="run_python", call=next_call(), lease=self._lease, code=source, timeout=timeout, max_output=max_output
        )
        reply = await self.ask(request)
        return _with_texts(self.part(reply.ran), reply)

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a regular file's bytes."""
        if not 0 <= max_bytes <= MAX_FILE:
            raise ConfigError(f"max_bytes={max_bytes}; give 0 to {MAX_FILE}")
        request = wire.ReadFile(op="read_file", call=next_call(), lease=self._lease, path=path, max_bytes=max_bytes)
        return self.part((await self.ask(request)).data)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it."""
        if len(data) > MAX_FILE:
            raise FileAccessError(f"{path} would have {len(data)} bytes; at most {MAX_FILE} are written")
        await self.ask(wire.WriteFile(op="write_file", call=next_call(), lease=self._lease, path=path, data=data))

    async def snapshot(self) -> Snapshot:
        """Return its files, and what brings its interpreter back."""
        reply = await self.ask(wire.TakeSnapshot(op="snapshot", call=next_call(), lease=self._lease))
        return packing.unpack_snapshot(self.part(reply.snapshot))

    async def restore(self, snapshot: Snapshot) -> str | None:
        """Bring another sandbox's files and variables into this one."""
        packed = packing.pack_snapshot(snapshot)
        request = wire.Restore(op="restore", call=next_call(), lease=self._lease, snapshot=packed)
        return (await self.ask(request)).missing

    async def start_process(self, launch: Launch) -> Process:
        """Start a process that outlives the call."""
        reply = await self.ask(wire.Start(op="start", call=next_call(), lease=self._lease, launch=launch))
        return RemoteProcess(self, self.part(reply.handle))

    async def open_stream(self, address: int | str, timeout: float) -> Stream:
        """Connect to a server in the sandbox."""
        request = wire.Connect(op="connect", call=next_call(), lease=self._lease, address=address, timeout=timeout)
        return RemoteStream(self, self.part((await self.ask(request)).handle))

    async def close(self) -> None:
        """End everything in it and give back the lease; nothing is left to do where the server is gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._abandon.detach()
        with contextlib.suppress(RemoteError):
            self._told(await asyncio.shield(_awaitable(_end(self._link, self._lease))))

    @property
    def lease(self) -> str:
        """Its name on the server."""
        return self._lease

    async def ask(self, request: wire.Ask) -> Reply:
        """Return the reply to a request.

        Raises:
            SandboxError: if the sandbox was closed, or is lost by the infrastructure's fault, such as with its server.
            ConfigError: if the request is too large.
        """
        return await self.settle(asyncio.wrap_future(self.begin(request)))

    def begin(self, request: wire.Ask) -> Future[Reply]:
        """Send a request; return what will hold the reply.

        Raises:
            SandboxError: if the sandbox was closed.
        """
        if self._is_closed:
            reason = "the sandbox was closed"
            raise SandboxError(f"the sandbox was lost: {reason}", SandboxLoss(Cause.CLOSED, reason))
        return self._link.connection.begin(self._link, request, self._hear)

    async def settle(self, answer: asyncio.Future[Reply]) -> Reply:
        """Await a reply; raises as `ask` does."""
        try:
            with counted():
                return await answer
        except SandboxError as error:
            if isinstance(error.loss, SandboxLoss):
                self._loss = error.loss
            raise
        except FrameSizeError as error:
            raise ConfigError(str(error)) from None
        except RemoteError as error:
            raise self._lose(error) from error

    def part(self, found: T | None) -> T:
        """Return what a reply should have.

        Raises:
            SandboxError: if the server has left it out.
        """
        try:
            return part(found)
        except RemoteError as error:
            raise self._lose(error) from None

    def _lose(self, error: RemoteError) -> SandboxError:
        cause = Cause.CLOSED if self._is_closed else Cause.BACKEND_GONE
        self._loss = SandboxLoss(cause, str(error))
        return SandboxError(f"the sandbox was lost: {error}", self._loss)

    def _hear(self, reply: Reply) -> None:
        self._loss = reply.loss or self._loss
        self._told(reply)


class RemoteStream(Stream):
    """The two directions of a process or a connection in a sandbox on a server, whose handle this is."""

    def __init__(self, sandbox: RemoteSandbox, handle: int) -> None:
        self._sandbox, self._handle = sandbox, handle
        self._reading, self._writing = LoopLock(), LoopLock()
        self._read: Future[Reply] | None = None
        """What a cancelled read has left under way: its bytes are the next one's."""
        self._left = Output(b"")
        """What came with a read that had asked for more."""
        self._is_closed = False

    async def read(self, max_bytes: int = MAX_READ, *, timeout: float = READ_TIMEOUT) -> Output:
        """Return the next bytes."""
        if not 0 < max_bytes <= MAX_READ:
            raise ConfigError(f"max_bytes={max_bytes}; give 1 to {MAX_READ}")
        _check_seconds(timeout)
        async with self._reading:
            if not self._left.data and not await self._fill(max_bytes, timeout):
                return Output(b"")
            taken, self._left = self._left, replace(self._left, data=self._left.data[max_bytes:], dropped=0)
            return Output(taken.data[:max_bytes], taken.dropped, taken.ended and not self._left.data)

    async def write(self, data: bytes, *, timeout: float = READ_TIMEOUT) -> None:
        """Write all of it."""
        _check_seconds(timeout)
        expires = time.monotonic() + timeout
        async with self._writing:
            for start in range(0, len(data), PIECE):
                left = max(0.0, expires - time.monotonic()) if timeout else 0.0
                await self._sandbox.ask(
                    wire.Write(op="write", **self._named(), data=data[start : start + PIECE], timeout=left)
                )

    async def write_eof(self) -> None:
        """Tell the other side that no more comes."""
        async with self._writing:
            await self._sandbox.ask(wire.WriteEof(op="write_eof", **self._named()))

    async def close(self) -> None:
        """End it."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(SandboxError):  # the sandbox is gone, and this with it
                await self._sandbox.ask(wire.EndStream(op="end", **self._named()))

    async def _fill(self, max_bytes: int, timeout: float) -> bool:
        """Read some more; return whether an answer came, which one to a read that was cancelled may not."""
        is_new = self._read is None
        if self._read is None:
            request = wire.Read(op="read", **self._named(), max_bytes=max_bytes, timeout=timeout)
            self._read = self._sandbox.begin(request)
        answer = _awaitable(self._read)
        if not is_new:
            await asyncio.wait([answer], timeout=timeout)
            if not answer.done():
                return False
        try:
            reply = await self._sandbox.settle(asyncio.shield(answer))
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._read = None
            raise
        self._read = None
        self._left = self._sandbox.part(reply.output)
        return True

    def _named(self) -> dict[str, Any]:
        return {"call": next_call(), "lease": self._sandbox.lease, "handle": self._handle}


class RemoteProcess(RemoteStream, Process):
    """A process in a sandbox on a server."""

    async def logs(self, max_bytes: int = MAX_LOG) -> Logs:
        """Return the last bytes of each of stdout and stderr."""
        if not 0 <= max_bytes <= MAX_LOG:
            raise ConfigError(f"max_bytes={max_bytes}; give 0 to {MAX_LOG}")
        reply = await self._sandbox.ask(wire.ReadLogs(op="logs", **self._named(), max_bytes=max_bytes))
        return self._sandbox.part(reply.logs)

    async def wait(self, *, timeout: float = READ_TIMEOUT) -> int | None:
        """Return how it ended; None if it still runs after the time."""
        _check_seconds(timeout)
        return (await self._sandbox.ask(wire.Wait(op="wait", **self._named(), timeout=timeout))).status

    async def signal(self, number: int) -> None:
        """Send it a signal."""
        await self._sandbox.ask(wire.Signal(op="signal", **self._named(), number=int(number)))

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its pty."""
        check_pty((rows, columns))
        await self._sandbox.ask(wire.Resize(op="resize", **self._named(), rows=rows, columns=columns))


def give_back(link: Link[Reply], lease: str) -> None:
    """Give a lease back and wait for nothing; where the connection is gone, so is the lease."""
    if not link.lost:
        with contextlib.suppress(RuntimeError):  # its thread has ended with the interpreter
            _end(link, lease).add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _end(link: Link[Reply], lease: str) -> Future[Reply]:
    return link.connection.begin(link, wire.Close(op="close", call=next_call(), lease=lease))


def _awaitable(begun: Future[Reply]) -> asyncio.Future[Reply]:
    """Return what awaits a reply, and lets asyncio not complain of a failure after its caller was cancelled."""
    answer = asyncio.wrap_future(begun)
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return answer


def _with_texts(result: R, reply: Reply) -> R:
    """Return a result with the outputs that came beside it."""
    return replace(result, stdout=packing.unpack_text(reply.out), stderr=packing.unpack_text(reply.err))


def _check_size(what: str, data: bytes) -> None:
    if len(data) > MAX_FILE:
        raise ConfigError(f"{what} of {len(data)} bytes; a remote sandbox takes at most {MAX_FILE}")


def _check_seconds(timeout: float) -> None:
    if not 0 <= timeout <= 86400:
        raise ConfigError(f"timeout={timeout}; give a number of seconds, 0 to a day")
