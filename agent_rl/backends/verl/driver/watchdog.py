"""Faults: what verl would wait for without end is noticed, named, and ends the run.

verl polls for episodes until they are there, and sends weights until a server has taken them. Where the process that
should answer is gone, or is stuck, both wait for ever. A thread beside the trainer asks all of them now and then.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

FAULT = "fault.txt"
"""In a run's folder: why it was ended."""
EVERY_S = 5.0
STUCK_S = 900.0
"""An event loop that has not answered for so long is blocked by an environment."""


@dataclass(slots=True)
class WatchedProcess:
    """A process that the run can't do without."""

    name: str
    ask: Callable[[], Future[str | None]]
    """Asks for a sign of life: None, or what is wrong. The future raises if the process is gone."""
    patience: float | None = None
    """After how many seconds no answer is a fault; None if it may be busy for as long as it likes."""
    advice: str = ""
    """What to do about one that does not answer."""
    _answer: Future[str | None] | None = field(default=None, init=False)
    _asked: float = field(default=0.0, init=False)

    def fault(self, now: float) -> str | None:
        """Return what is wrong with it by now, in seconds of any clock; None if nothing is known to be."""
        if self._answer is None:
            self._answer, self._asked = self.ask(), now
        if not self._answer.done():
            late = self.patience is not None and now - self._asked > self.patience
            return f"{self.name} has not answered for {now - self._asked:.0f} s: {self.advice}" if late else None
        answer, self._answer = self._answer, None
        if (error := answer.exception()) is not None:
            return f"{self.name} is gone: {type(error).__name__}: {_first_line(error)}"
        return f"{self.name}: {answer.result()}" if answer.result() else None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


class Watchdog:
    """Looks at everything that is watched, until it is left; `with Watchdog(...):`."""

    def __init__(self, watched: Sequence[WatchedProcess], end: Callable[[str], None], every: float = EVERY_S) -> None:
        """Take note of what to watch.

        Args:
            watched: in the order in which faults are looked for.
            end: is called once, from another thread, with what is wrong.
            every: seconds between two looks.
        """
        self._watched, self._end, self._every = watched, end, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def _look(self) -> None:
        while not self._over.wait(self._every):
            fault = next((found for part in self._watched if (found := part.fault(time.monotonic()))), None)
            if fault is not None:
                self._end(fault)
                return

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def end_with(folder: Path) -> Callable[[str], None]:
    """Return what ends this process at once, whatever its main thread waits for, and leaves the reason in a folder."""

    def end(fault: str) -> None:
        (folder / FAULT).write_text(fault)
        os._exit(1)

    return end


def explain(folder: Path) -> str | None:
    """Return why a run was ended, if a watchdog ended it."""
    file = folder / FAULT
    return file.read_text() if file.exists() else None
