"""How much of its environment's time an episode has used, and the waits that are left out of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
AHEAD = 1.0
"""Seconds that a wait of unknown length is left out ahead of time."""


class Meter:
    """How much of the environment's time an episode has used."""

    spent = 0.0
    """Seconds, of calls that have returned."""
    clock: asyncio.Timeout | None = None
    """Of the call that is running, or of the rewards."""
    _excused_until = 0.0

    def excuse(self, start: float, end: float) -> None:
        """Leave out a wait, by `time.monotonic`; waits of several calls at a time are left out once."""
        extra = end - max(start, self._excused_until)
        if extra <= 0:
            return
        self._excused_until = end
        self._leave_out(extra)

    def resume(self, until: float) -> None:
        """Count again what a wait that is over left out ahead of time, unless another one left it out, too."""
        ahead = until - time.monotonic()
        if ahead > 0 and self._excused_until == until:
            self._excused_until -= ahead
            self._leave_out(-ahead)

    def _leave_out(self, extra: float) -> None:
        self.spent -= extra
        if self.clock is not None and not self.clock.expired() and (when := self.clock.when()) is not None:
            self.clock.reschedule(when + extra)


meter: ContextVar[Meter | None] = ContextVar("meter", default=None)
"""Of the episode that is running."""


def time_left() -> float | None:
    """Return the seconds that what is running has left; None if there is no limit."""
    running = meter.get()
    when = running.clock.when() if running is not None and running.clock is not None else None
    return None if when is None else when - asyncio.get_running_loop().time()


async def sleep_uncounted(seconds: float) -> None:
    """Sleep, as for a rate limit, without using up the time of the episode's environment."""
    running, started = meter.get(), time.monotonic()
    if running is not None:
        running.excuse(started, started + seconds)
    await asyncio.sleep(seconds)
    if running is not None:
        running.excuse(started, time.monotonic())  # it took longer


async def wait_uncounted(wait: Awaitable[T]) -> T:
    """Await a turn that others keep one waiting for, without using up the time of the episode's environment."""
    running, loop, timer, until = meter.get(), asyncio.get_running_loop(), None, 0.0

    def excuse() -> None:
        nonlocal timer, until
        if running is not None:
            until = (now := time.monotonic()) + AHEAD
            running.excuse(now, until)
            timer = loop.call_later(AHEAD / 4, excuse)

    excuse()
    try:
        return await wait
    finally:
        if timer is not None:
            timer.cancel()
        if running is not None:
            running.resume(until)
