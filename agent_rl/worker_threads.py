"""Worker threads: blocking calls beside an event loop, quick ones together while it waits; calls at intervals."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

QUICK = 2e-4
"""Seconds within which a call in a worker thread is quick: the next of that name may hold up the event loop."""
HOLD = 5e-3
"""Seconds that it holds it up at most, with all that are made in the same turn of the loop."""


FROZEN = 60.0
"""Seconds without a look of a watchdog after which all threads' stacks are printed."""


@contextlib.contextmanager
def at_intervals(seconds: float, function: Callable[[], object], name: str) -> Iterator[None]:
    """Call a function every so many seconds, in a thread of its own, until the context ends.

    A call into C that keeps the interpreter's lock, such as `9**9**9` or a regular expression that backtracks, freezes
    all threads, this one as well: `faulthandler`, which needs none of Python, then prints where they are to stderr.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(seconds):
            function()
            _print_stacks_unless_called_again()

    _print_stacks_unless_called_again()
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _print_stacks_unless_called_again() -> None:
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # there is no stderr, or it is closed
        faulthandler.dump_traceback_later(FROZEN, file=sys.__stderr__)  # type: ignore[arg-type]


class WorkerCall(Generic[T]):
    """A call in a worker thread, with the caller's context variables.

    A worker that has returned takes the next call, as starting a thread costs ten times as much. One that never returns
    is left behind, as nothing can kill it: it holds up neither other calls nor the exit.

    Calls that are likely to be quick wait for the next turn of their event loop. One worker then makes them all, one
    after the other, while the loop waits: they share the switch to another thread and back, which costs 20 to 70 µs.
    """

    __slots__ = ("_context", "_finished", "_function", "_name", "_outcome", "_tried", "_waiter")

    def __init__(self, function: Callable[[], T], name: str, *, quick: bool = False) -> None:
        """Begin at once, or, if `quick` and the last call of the same name was not slow, in the loop's next turn.

        Args:
            function: what to call.
            name: the thread's meanwhile.
            quick: whether the call may hold up the event loop, for `HOLD` seconds; `returns_quickly` waits for it.
        """
        self._function, self._name = function, name
        self._context = contextvars.copy_context()
        self._finished = threading.Lock()
        self._finished.acquire()
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._tried: asyncio.Future[None] | None = None
        if quick and name not in _slow:
            self._tried = _join(self)
        else:
            self.begin()

    def begin(self) -> None:
        """Give the call to a worker of its own."""
        try:
            worker = _idle.pop()
        except IndexError:
            worker = _Worker()
        worker.calls.put(self)

    def returns_within(self, seconds: float) -> bool:
        """Wait, holding up the event loop, for a call that has begun; return whether it returned."""
        return self._outcome is not None or self._finished.acquire(timeout=seconds)

    async def returns_quickly(self) -> bool:
        """Wait for a `quick` call until it held up the loop long enough; return whether it returned.

        One that is cancelled before it began is not made.
        """
        if self._tried is not None:
            await self._tried
        return self._outcome is not None

    async def result(self) -> T:
        """Wait on the event loop; return the function's result, or raise its exception."""
        if self._outcome is None:
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiter = loop, future
            if self._outcome is None:  # it may have ended before there was a waiter
                await future
        return self.finished()

    def finished(self) -> T:
        """Return the result of a finished call, or raise its exception."""
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return cast(T, value)

    def run(self, worker: _Worker | None = None) -> None:
        """Make the call, in a worker's thread; `worker` is that which is idle after it."""
        threading.current_thread().name = self._name
        started = time.perf_counter()
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = self._context.run(self._function), None
        except BaseException as error:
            outcome = None, error
        if time.perf_counter() - started < QUICK:
            _slow.discard(self._name)
        else:
            _slow.add(self._name)
        if worker is not None:
            _idle.append(worker)  # before the result is known: the next call is to find this worker
        self._outcome = outcome
        self._finished.release()
        if self._waiter is not None:
            loop, future = self._waiter
            with contextlib.suppress(RuntimeError):  # the loop was closed while an abandoned call ran
                loop.call_soon_threadsafe(_wake, future)

    def mark_slow(self) -> None:
        """Remember that a call of this name takes long, if it has not returned."""
        if self._outcome is None:
            _slow.add(self._name)


_joined: dict[asyncio.AbstractEventLoop, list[tuple[WorkerCall[Any], asyncio.Future[None]]]] = {}
"""The calls for each loop's next turn, with what is done when they have held it up long enough."""


def _join(call: WorkerCall[Any]) -> asyncio.Future[None]:
    """Leave a call to the running loop's next turn."""
    loop = asyncio.get_running_loop()
    tried = loop.create_future()
    if (joined := _joined.get(loop)) is None:
        joined = _joined[loop] = []
        loop.call_soon(_make_joined, loop)
    joined.append((call, tried))
    return tried


def _make_joined(loop: asyncio.AbstractEventLoop) -> None:
    """Make the calls of the loop's last turn in one worker; those behind a slow one get a worker each."""
    joined = [(call, tried) for call, tried in _joined.pop(loop) if not tried.cancelled()]
    left = deque(call for call, _ in joined)

    def make_each() -> None:
        while (call := _next(left)) is not None:
            call.run()

    if joined and not WorkerCall(make_each, "agent_rl quick calls").returns_within(HOLD):
        behind = list(iter(partial(_next, left), None))
        for call, _ in joined[: len(joined) - len(behind)]:
            call.mark_slow()
        for call in behind:
            call.begin()
    for _, tried in joined:
        _wake(tried)


def _next(left: deque[WorkerCall[Any]]) -> WorkerCall[Any] | None:
    try:
        return left.popleft()
    except IndexError:  # another thread was faster
        return None


class _Worker(threading.Thread):
    """A daemon thread that makes one call after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls: SimpleQueue[WorkerCall[Any]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        is_kept = True
        while is_kept:
            running = self.calls.get()
            is_kept = len(_idle) < MOST_IDLE
            running.run(self if is_kept else None)
            del running  # and with it the function, what it holds, and what it returned


def idle_threads() -> frozenset[threading.Thread]:
    """Return the worker threads that wait for a call."""
    return frozenset(_idle)


MOST_IDLE = 64
_idle: list[_Worker] = []
_slow: set[str] = set()
"""The names whose last call was not quick."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # threads don't survive a fork


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # a timeout may have cancelled it
        future.set_result(None)


async def in_thread(function: Callable[[], T], name: str, *, quick: bool = False) -> T:
    """Return the result of a `WorkerCall`."""
    running = WorkerCall(function, name, quick=quick)
    if await running.returns_quickly():
        return running.finished()
    return await running.result()


def outside_loop(work: Callable[[], T], on_interrupt: Callable[[], object] | None = None) -> T:
    """Run blocking work that may start an event loop: in a thread if this one has a running loop, as in a notebook.

    Args:
        work: what to run, with the caller's context variables.
        on_interrupt: called when Ctrl-C, or a notebook's interrupt, comes while a thread works; the work is then to end
            soon. If it is left out, the caller gets the KeyboardInterrupt and the thread is left behind.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    is_watched = threading.Event()  # the work begins where an interrupt is caught, and not before

    def watched() -> T:
        is_watched.wait()
        return work()

    running, is_running = WorkerCall(watched, "agent_rl"), True
    while is_running:
        try:
            is_watched.set()
            is_running = not running.returns_within(0.2)  # a signal that another thread received wakes nothing
        except KeyboardInterrupt:
            if on_interrupt is None:
                raise
            on_interrupt()
    return running.finished()
