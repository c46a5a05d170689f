"""Measurements of one contestant of `benchmarks/sandbox.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from sandbox_table import Measure

T = TypeVar("T")
SECONDS, AT_LEAST = 1.0, 5
"""Seconds of repetition of each measurement, and the least number of repetitions."""
AT_REST, AT_ONCE = 8, 4
CODE, ANSWER = "6 * 7", "42"
_HOLDER, _ENGINE = "containerd-shim", "dockerd"
_ECHO = "import os, sys\nfd = int(sys.argv[1])\nwhile data := os.read(fd, 1):\n    os.write(fd, data)"


class NotHereError(Exception):
    """A contestant is missing on this machine; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class Contestant(Generic[T]):
    """A way of running code, as its operations."""

    open: Callable[[], Awaitable[T]]
    close: Callable[[T], Awaitable[object]]
    python: Callable[[T], Awaitable[str | None]]
    """Evaluates CODE in it, and returns what came out."""
    command: Callable[[T], Awaitable[object]] | None = None
    measures: frozenset[Measure] = frozenset(Measure)
    """The measures taken of it."""
    beside: str | None = None
    """The name of ours that it is compared with; None: it is ours."""
    stateful: bool = False
    """Whether a Python call finds the variables of the last one."""
    version: str = ""
    """The version of the measured program, if that is not agent_rl or this Python."""


async def _call(contestant: Contestant[Any]) -> float:
    async with _opened(contestant, 1) as (box,):
        return await _median(lambda: _python(contestant, box))


async def _command(contestant: Contestant[Any]) -> float:
    run = contestant.command
    if run is None:
        raise NotHereError("it runs no commands")
    async with _opened(contestant, 1) as (box,):
        return await _median(lambda: run(box))


async def _open(contestant: Contestant[Any]) -> float:
    return await _median(contestant.open, contestant.close)


async def _first(contestant: Contestant[T]) -> float:
    async def one() -> T:
        box = await contestant.open()
        await _python(contestant, box)
        return box

    return await _median(one, contestant.close)


async def _idle(contestant: Contestant[Any], *, used: bool = False) -> float:
    async with _opened(contestant, 1):  # memory taken once belongs to no sandbox
        others = containers()
        before = megabytes()
        async with _opened(contestant, AT_REST, used=used):
            return (megabytes(containers() - others) - before) / AT_REST


async def _rate(contestant: Contestant[Any]) -> float:
    count = 0

    async def many(box: object) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await _python(contestant, box)
            count += 1

    async with _opened(contestant, AT_ONCE) as boxes:
        start = time.perf_counter()
        end = start + SECONDS
        await asyncio.gather(*map(many, boxes))
        return count / (time.perf_counter() - start)


METERS: Mapping[Measure, Callable[[Contestant[Any]], Awaitable[float]]] = {
    Measure.CALL: _call,
    Measure.COMMAND: _command,
    Measure.OPEN: _open,
    Measure.FIRST: _first,
    Measure.IDLE: _idle,
    Measure.USED: partial(_idle, used=True),
    Measure.RATE: _rate,
}
"""The meter of each measure."""


async def _python(contestant: Contestant[T], box: T) -> None:
    if (answer := await contestant.python(box)) != ANSWER:
        raise RuntimeError(f"{CODE} came out as {answer!r}")


@contextlib.asynccontextmanager
async def _opened(contestant: Contestant[T], count: int, *, used: bool = True) -> AsyncIterator[list[T]]:
    """Open sandboxes that have run Python, or have not; close them in the end."""
    async with contextlib.AsyncExitStack() as stack:
        boxes = []
        for _ in range(count):
            boxes.append(await contestant.open())
            stack.push_async_callback(contestant.close, boxes[-1])
            if used:
                await _python(contestant, boxes[-1])
        yield boxes


async def _median(act: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None = None) -> float:
    """Return the median time of an act, in milliseconds; undoing it is not counted."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < AT_LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        done = await act()
        times.append(time.perf_counter() - start)
        if undo is not None:
            await undo(done)
    return 1e3 * statistics.median(times)


def round_trip() -> float:
    """Return the median time of one byte there and back between two processes, in milliseconds."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", _ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]):
        theirs.close()
        with ours:
            times = []
            for _ in range(5000):
                start = time.perf_counter()
                ours.send(b"x")
                ours.recv(1)
                times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def megabytes(outside: Collection[int] = ()) -> float:
    """Return the memory of this process, `others` and all descendants; shared pages count in proportion.

    A Docker engine below this process is left out: what it holds comes and goes.

    Raises:
        NotHereError: if this user may not know.
    """
    processes = _processes()
    family = {os.getpid(), *outside}
    while more := {pid for pid, (up, name) in processes.items() if up in family and name != _ENGINE} - family:
        family |= more
    return sum(map(_share, family)) / 1024


def containers() -> set[int]:
    """Return the processes that hold a container each; they are not below this one."""
    return {pid for pid, (_, name) in _processes().items() if name == _HOLDER}


def _processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the name of every process."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            start, _, rest = stat.read_text().rpartition(")")
            found[int(stat.parent.name)] = int(rest.split()[1]), start.partition("(")[2]
    return found


def _share(pid: int) -> int:
    """Return a process's part of the memory, in KiB; 0 if it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        raise NotHereError("the memory of other users' processes takes root to measure") from None
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
