"""agent_rl.concurrency.LoopThread: an event loop that outlives those of its callers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_rl.concurrency import LoopThread, run_together, to_the_end


async def where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    return asyncio.get_running_loop(), threading.current_thread()


def test_loop_thread_is_shared_by_callers() -> None:
    loop = LoopThread("there")
    places = [asyncio.run(loop.run(where())), asyncio.run(loop.run(where())), loop.wait(where())]
    assert len(set(places)) == 1 and places[0][1] is not threading.current_thread()
    loop.close()
    assert places[0][0].is_closed() and not places[0][1].is_alive()


def test_loop_thread_passes_errors_and_cancellations() -> None:
    cancelled = threading.Event()

    async def fails() -> None:
        raise KeyError("broken")

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def waits() -> None:
        async with asyncio.timeout(0.01):
            await loop.run(hangs())

    loop = LoopThread("there")
    with pytest.raises(KeyError, match="broken"):
        asyncio.run(loop.run(fails()))
    with pytest.raises(TimeoutError):
        asyncio.run(waits())
    assert cancelled.wait(5)
    loop.close()


def test_loop_thread_close_cancels_running_tasks() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    loop = LoopThread("there")
    task = loop.wait(begin())
    loop.close()
    assert ended == ["cancelled"] and task.cancelled()


def test_work_to_the_end_hands_an_exit_to_its_caller() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def main() -> str:
        with pytest.raises(SystemExit):
            await to_the_end(leave())
        return "the loop runs"

    assert asyncio.run(main()) == "the loop runs"


def test_run_together_hands_an_exit_to_its_caller() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def main() -> str:
        with pytest.raises(SystemExit):
            await run_together([leave, leave])
        return "the loop runs"

    assert asyncio.run(main()) == "the loop runs"
