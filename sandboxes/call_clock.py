"""For how long an episode waited for calls of sandboxes, by the clock of an event loop that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

BEAT = 1.0
"""Seconds that are counted at a time. What an event loop stands still in one of them is the host's, and left out."""


class CallClock:
    """Adds up the time in which at least one call was under way."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """So far, in calls that have ended and in beats that are over."""
        self._running, self._since = 0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        """Count from now on."""
        self._running += 1
        if self._running == 1:
            self._since = asyncio.get_running_loop().time()
            self._wait()

    def __exit__(self, *_: object) -> None:
        """Count no further, unless another call is under way."""
        self._running -= 1
        if not self._running and self._timer is not None:
            self._timer.cancel()
            self._add(self._timer.when())

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._since + BEAT, self._beat)

    def _beat(self) -> None:
        self._add(self._since + BEAT)
        self._wait()

    def _add(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        self.seconds += min(now, due) - self._since
        self._since = now


clock: ContextVar[CallClock | None] = ContextVar("call_clock", default=None)
"""Of the episode whose part is under way."""


_NOBODY = nullcontext()


def counted() -> AbstractContextManager[None]:
    """Count a call of a sandbox, if somebody does; it is made with each."""
    return clock.get() or _NOBODY


@contextmanager
def counting(calls: CallClock) -> Iterator[None]:
    """Have a clock count the calls that are made meanwhile, in tasks begun meanwhile, too."""
    before = clock.set(calls)
    try:
        yield
    finally:
        clock.reset(before)
