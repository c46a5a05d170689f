"""Processes and streams of a sandbox whose agent answers over a byte stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from agent_rl.concurrency import LoopLock
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.agent.frames import Head
from agent_rl.sandboxes.agent.relay import CONNECTED
from agent_rl.sandboxes.client.answers import text_pair, whole_number
from agent_rl.sandboxes.client.fate import EndedByCodeError
from agent_rl.sandboxes.process import (
    MAX_LOG,
    MAX_READ,
    READ_TIMEOUT,
    Logs,
    Output,
    Process,
    ProcessError,
    Stream,
    check_pty,
)

T = TypeVar("T")
Read = Callable[[Head, bytes, float], Awaitable[T]]
"""Makes a result of an answer and the seconds that it took; what it can't read is a KeyError or a TypeError."""


class Ask(Protocol):
    """Sends a request to the agent and returns what `read` makes of its answer."""

    async def __call__(self, op: str, head: Head, body: bytes, timeout: float, read: Read[T]) -> T:
        """Raise SandboxError or ProcessError if there is none."""
        ...


class AgentStream(Stream):
    """The two directions of a process in a sandbox, whose handle this is.

    Everything is pulled: the agent sends what was asked for, of at most the size that was asked for.
    """

    def __init__(self, ask: Ask, handle: int) -> None:
        self._ask, self._handle = ask, handle
        self._at = 0
        self._reading, self._writing = LoopLock(), LoopLock()
        self._is_closed = False

    async def connected(self, timeout: float) -> None:
        """Wait until a relay has reached its server.

        Raises:
            ProcessError: if it hasn't.
        """
        try:
            said = await self._read(len(CONNECTED), timeout)
            if said.data == CONNECTED:
                return
            reason = (await self._logs(MAX_READ)).stderr.strip()
            raise ProcessError(reason or "the stream's process was ended before it was connected")
        except BaseException:
            await asyncio.shield(self.close())
            raise

    async def read(self, max_bytes: int = MAX_READ, *, timeout: float = READ_TIMEOUT) -> Output:
        """Return the next bytes."""
        if not 0 < max_bytes <= MAX_READ:
            raise ConfigError(f"max_bytes={max_bytes}; give 1 to {MAX_READ}")
        return await self._read(max_bytes, _seconds(timeout))

    async def write(self, data: bytes, *, timeout: float = READ_TIMEOUT) -> None:
        """Write all of it."""
        expires = time.monotonic() + _seconds(timeout)
        async with self._writing:
            for start in range(0, len(data), MAX_READ):
                left = max(0.0, expires - time.monotonic())
                await self._tell("give", {"now": not left}, data[start : start + MAX_READ], left)

    async def write_eof(self) -> None:
        """Tell the other side that no more comes."""
        async with self._writing:
            await self._tell("shut")

    async def close(self) -> None:
        """End it."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(SandboxError, ProcessError):  # the sandbox is gone, and this with it
                await self._tell("drop")

    async def _read(self, size: int, timeout: float) -> Output:
        async with self._reading:
            head: Head = {"at": self._at, "keep": size, "now": not timeout}

            async def read(answer: Head, data: bytes, seconds: float) -> Output:
                at = whole_number(answer, "at")
                if at < self._at or len(data) > size:
                    raise TypeError(f"{len(data)} bytes from {at} on, when {size} from {self._at} on were asked for")
                dropped = at - self._at
                self._at = at + len(data)
                return Output(data, dropped, answer["ended"] is True)

            return await self._call("take", head, b"", timeout, read)

    async def _logs(self, size: int) -> Logs:
        async def read(answer: Head, data: bytes, seconds: float) -> Logs:
            return Logs(*await text_pair(answer, data), answer["cut"] is True)

        return await self._call("logs", {"keep": size}, b"", 0.0, read)

    async def _tell(self, op: str, head: Head | None = None, body: bytes = b"", timeout: float = 0.0) -> None:
        async def read(answer: Head, data: bytes, seconds: float) -> None:
            return None

        await self._call(op, head or {}, body, timeout, read)

    async def _call(self, op: str, head: Head, body: bytes, timeout: float, read: Read[T]) -> T:
        return await self._ask(op, {"handle": self._handle, **head}, body, timeout, read)


class AgentProcess(AgentStream, Process):
    """A process in a sandbox."""

    async def logs(self, max_bytes: int = MAX_LOG) -> Logs:
        """Return the last bytes of each of stdout and stderr."""
        if not 0 <= max_bytes <= MAX_LOG:
            raise ConfigError(f"max_bytes={max_bytes}; give 0 to {MAX_LOG}")
        return await self._logs(max_bytes)

    async def wait(self, *, timeout: float = READ_TIMEOUT) -> int | None:
        """Return how it ended; None if it still runs after the time."""
        seconds = _seconds(timeout)

        async def read(answer: Head, data: bytes, took: float) -> int | None:
            return None if answer["code"] is None else whole_number(answer, "code")

        return await self._call("wait", {"now": not seconds}, b"", seconds, read)

    async def signal(self, number: int) -> None:
        """Send it a signal."""
        if not 0 < number < 65:
            raise ConfigError(f"signal {number}: give 1 to 64, such as signal.SIGINT")
        await self._tell("signal", {"number": int(number)})

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its pty."""
        await self._tell("resize", {"pty": check_pty((rows, columns))})


def _seconds(timeout: float) -> float:
    if not 0 <= timeout <= 86400:
        raise ConfigError(f"timeout={timeout}; give a number of seconds, 0 to a day")
    return timeout


async def of_process(call: Awaitable[T]) -> T:
    """Await a call.

    Raises:
        ProcessError: if the sandbox is gone, by what its code did.
    """
    try:
        return await call
    except EndedByCodeError as end:
        raise ProcessError(str(end)) from None


async def handle_of(answer: Head, data: bytes, seconds: float) -> int:
    """Return the handle of what was started."""
    return whole_number(answer, "handle")


def refuse(answer: Head) -> None:
    """Raise what an answer has against a request.

    Raises:
        ProcessError: if it was not done.
    """
    if answer.get("problem") is not None:
        raise ProcessError(str(answer["problem"]))
