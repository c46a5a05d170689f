"""Pace: requests and tokens per minute, taken evenly."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """A rate without bursts: each taking moves the time of the next one."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._due = 0.0

    def take(self, amount: float = 1.0) -> float:
        """Book an amount; return how many seconds to wait before it may be used."""
        now = self._clock()
        start = max(now, self._due)
        self._due = start + amount * self._seconds
        return start - now

    def correct(self, amount: float) -> None:
        """Book what was used beyond an amount taken; less than 0 gives back."""
        self._due += amount * self._seconds

    def pause(self, seconds: float) -> None:
        """Let nothing be used for some seconds."""
        self._due = max(self._due, self._clock() + seconds)
