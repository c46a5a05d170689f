"""Small ways to wait: for what may be async or not, for several at once, for a thread, for another thread's loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TypeVar, cast

T = TypeVar("T")


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Return the value, awaited if it has to be."""
    if inspect.isawaitable(value):
        return await value
    return value


async def call(function: Callable[[], T | Awaitable[T]], *, thread: str | None = None) -> T:
    """Call what may be async or not; `thread` names a thread of its own for one that blocks, see `in_thread`."""
    return await maybe_await(function() if thread is None else await in_thread(function, thread))


async def run_together(starts: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Await all at once; the first exception cancels the others and is raised bare, not in a group."""
    if len(starts) == 1:
        return [await starts[0]()]

    async def run(start: Callable[[], Awaitable[T]]) -> T:
        return await start()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(start)) for start in starts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def in_thread(function: Callable[[], T], name: str) -> T:
    """Run in a fresh daemon thread, with the caller's context variables.

    Not in a pool: a function that never returns must hold up neither the exit nor the pool's other users. Whoever
    stops waiting leaves the thread behind, as nothing can kill it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not done.done():  # nobody waits any more after a timeout
            done.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = context.run(function)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed while an abandoned call went on
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return cast(T, value)


class LoopThread:
    """An event loop in a thread of its own, for what must outlive `asyncio.run`: connections, an engine's tasks."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run there; block until it is done."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run there; a cancellation here cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""

        async def drain() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_asyncgens()

        self.wait(drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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
    context, done = contextvars.copy_context(), Future[T]()

    def run() -> None:
        try:
            done.set_result(context.run(work))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join(0.2)  # not for ever: a signal that another thread received wakes nothing
        except KeyboardInterrupt:
            if on_interrupt is None:
                raise
            on_interrupt()
    return done.result()
