"""Small ways to wait: for what may be async or not, for several at once, for another thread's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from agent_rl.worker_threads import in_thread

if TYPE_CHECKING:
    from typing_extensions import TypeIs

T = TypeVar("T")


def is_awaitable(value: T | Awaitable[T]) -> TypeIs[Awaitable[T]]:
    """Return whether a value has to be awaited; 0.1 µs, where `inspect.isawaitable` takes up to 1."""
    return hasattr(type(value), "__await__")


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Return the value, awaited if it has to be."""
    return await value if is_awaitable(value) else value


async def call(function: Callable[[], T | Awaitable[T]], *, thread: str | None = None) -> T:
    """Call a function, sync or async; `thread` is the name of a worker thread for a blocking one."""
    return await maybe_await(function() if thread is None else await in_thread(function, thread))


ENDING = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""What ends more than the call that it comes out of; all else that a user's function raises is its own, be it a
SystemExit or a panic of Rust's, which are no `Exception`s."""


class PlayerTask(asyncio.Task[T]):
    """A task that tells whether what runs in it cancelled it, or somebody else."""

    by_itself = 0
    """How often it was cancelled from within."""

    def cancel(self, msg: object = None) -> bool:
        """Cancel it."""
        self.by_itself += asyncio.current_task(self.get_loop()) is self
        return super().cancel(msg)


def is_cancelled_by_others() -> bool:
    """Whether somebody cancels the current task: of one that is no `PlayerTask` nobody knows who did."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > getattr(task, "by_itself", 0)


class LoopLock:
    """A lock for the tasks of one event loop after the other: while it is free, another loop's may take it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop and not self._lock.locked():
            self._lock, self._loop = asyncio.Lock(), loop
        await self._lock.acquire()

    async def __aexit__(self, *raised: object) -> None:
        self._lock.release()


async def to_the_end(work: Coroutine[object, object, T]) -> T:
    """Await work that a cancellation must not cut short; the caller is cancelled after it.

    Only what cancels every task of an event loop, as its end does, cancels the work.
    """

    async def run() -> tuple[T | None, SystemExit | None]:
        try:
            return await work, None
        except SystemExit as error:  # of a task it would end the event loop: it is for the caller
            return None, error

    task, cancelled = asyncio.create_task(run()), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # so that asyncio does not warn that it was not looked at
        raise cancelled
    result, exited = task.result()
    if exited is not None:
        raise exited
    return cast(T, result)


async def run_together(starts: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Await all at once; the first exception cancels the others and is raised bare, not in a group."""
    if len(starts) == 1:
        return [await starts[0]()]

    async def run(start: Callable[[], Awaitable[T]]) -> T:
        try:
            return await start()
        except SystemExit as error:  # of a task it would end the event loop: it is for the caller
            raise _ExitedError from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(start)) for start in starts]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise (first.__cause__ or first if isinstance(first, _ExitedError) else first) from None
    return [task.result() for task in tasks]


class _ExitedError(Exception):
    """A task called `sys.exit()`, which is its cause."""


class LoopThread:
    """An event loop in a thread of its own, for what must outlive `asyncio.run`: connections, an engine's tasks."""

    def __init__(self, name: str) -> None:
        started = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

        async def serve() -> None:
            ended = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), ended))
            await ended.wait()

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), name=name, daemon=True)
        self._thread.start()
        self._loop, self._ended = started.result()

    def begin(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run there; return what will hold the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run there; block until it is done."""
        return self.begin(coroutine).result()

    async def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run there; a cancellation here cancels it there."""
        return await asyncio.wrap_future(self.begin(coroutine))

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()


class CallingThread:
    """Calls that an event loop in another thread leaves to this one, such as to read from a terminal."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def call(self, function: Callable[[], T]) -> T:
        """Have a function called by the thread that serves; return its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(run)
        return await asyncio.wrap_future(future)

    def serve(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine in a thread with an event loop, and its calls here; an interrupt ends the coroutine first."""
        loop = LoopThread("agent_rl calls")

        async def served() -> T:
            try:
                return await coroutine
            finally:
                self._calls.put(None)

        try:
            result = loop.begin(served())
            while (call := self._calls.get()) is not None:
                call()
            return result.result()
        finally:
            loop.close()


class AsyncOnce(Generic[T]):
    """The result of a coroutine that runs once, however many wait for it; after a failure it runs again."""

    def __init__(self, start: Callable[[], Coroutine[object, object, T]]) -> None:
        self._start = start
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the result; run the coroutine if there is none yet."""
        task = self._task
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            return task.result()
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            task = self._task = asyncio.create_task(self._start())
        return await asyncio.shield(task)  # a cancelled waiter does not cancel it for the others
