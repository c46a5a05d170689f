"""Stopping a run between two steps: Ctrl-C in a terminal, or a notebook's interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """A run stopped between two steps, as it was asked to; the message says how to continue."""

    __module__ = "agent_rl"


class Stop:
    """Whether a run is asked to stop after its present step."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.is_asked = False
        self._say = say

    def interrupt(self, *_: object) -> None:
        """Ask the run to stop; the second time, raise KeyboardInterrupt. A handler of signals."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        self._say("\n[yellow]Stopping after this step; Ctrl-C again stops at once.[/yellow]")

    def check(self, hint: str) -> None:
        """Raise `Interrupted` with the hint if the run was asked to stop."""
        if self.is_asked:
            raise Interrupted(hint)

    @contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        """Let Ctrl-C ask; in the main thread only, as no other can handle signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGINT, self.interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
