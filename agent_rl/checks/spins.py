"""Spins: what holds up the event loop for good in an episode of a check, as a loop that awaits nothing, is ended."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent_rl.rollout.episode import runs_under_way
from agent_rl.worker_threads import at_intervals

SHORTEST = 10.0
"""Seconds that the event loop may be held up at least: a busy machine holds it up, too."""


class SpinError(Exception):
    """Raised in what holds up the event loop."""


@contextmanager
def ended_spins(seconds: float, on_spin: Callable[[str], object]) -> Iterator[None]:
    """Raise `SpinError` in this thread, which runs an event loop, when an episode has held it up for so long.

    Python code is ended by it; a call into C that never returns is not.

    Args:
        seconds: without a turn of the loop, and without a step of any episode.
        on_spin: called before with its stack, in another thread.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    limit, turned = max(seconds, SHORTEST), time.perf_counter()

    def turn() -> None:
        nonlocal turned
        turned = time.perf_counter()

    def watch() -> None:
        loop.call_soon_threadsafe(turn)
        began = [run.clock.since for run in runs_under_way()]
        if began and time.perf_counter() - max(turned, *began) >= limit:
            on_spin("".join(traceback.format_stack(sys._current_frames()[thread])))
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SpinError))
            turn()  # what catches it gets as long again

    with at_intervals(min(1.0, limit / 4), watch, "agent_rl check watchdog"):
        yield
