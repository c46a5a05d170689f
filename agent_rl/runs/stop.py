"""Stopping a run at its next good moment: Ctrl-C, a closed terminal, a scheduler's SIGTERM, a notebook's interrupt."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """A run stopped, as it was asked to; the message says how to continue."""

    __module__ = "agent_rl"


class Stop:
    """Whether a run is asked to stop."""

    hint = ""
    """How to continue the run, as it is now."""

    def __init__(
        self,
        say: Callable[[str], object],
        notice: str = "Stopping after this step; Ctrl-C again stops at once.",
    ) -> None:
        """Begin without a request.

        Args:
            say: prints a line.
            notice: what it says when it is asked.
        """
        self.is_asked = False
        self._on_ask: Callable[[], object] = lambda: None
        self._say, self._notice = say, notice

    def interrupt(self, *_: object) -> None:
        """Ask the run to stop; the second time, raise `Interrupted` with the hint. A handler of signals."""
        if self.is_asked:
            _silence_loop()
            raise Interrupted(self.hint)
        self.is_asked = True
        self._say(f"\n[yellow]{self._notice}[/yellow]")
        self._on_ask()

    def hang_up(self, *_: object) -> None:
        """Ask, once: the system tells of a closed terminal, and the shell in it again. A handler of signals."""
        if not self.is_asked:
            self.interrupt()

    def cancel_when_asked(self) -> None:
        """Cancel the asyncio task that calls this, once the run is asked to stop."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._on_ask = lambda: loop.call_soon_threadsafe(task.cancel)  # from a handler of signals

    def check(self) -> None:
        """Raise `Interrupted` with the hint if the run was asked to stop."""
        if self.is_asked:
            raise Interrupted(self.hint)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let Ctrl-C, SIGTERM and SIGHUP ask; in the main thread only, as no other can handle signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGINT: self.interrupt, signal.SIGTERM: self.interrupt, signal.SIGHUP: self.hang_up}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            del handlers[signal.SIGHUP]
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _silence_loop() -> None:
    """Let the event loop that runs here, if one does, end without a word on the tasks that an interrupt tears down."""
    try:
        asyncio.get_running_loop().set_exception_handler(_unless_interrupted)
    except RuntimeError:
        return


def _unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    if not isinstance(context.get("exception"), Interrupted):
        loop.default_exception_handler(context)
