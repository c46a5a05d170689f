"""The agent's side of the stateful Python interpreter (`worker` is the other)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from . import worker
from .processes import EXTRA_FD, Child, Family
from .wire import CHUNK, FrameError, Frames, Head


@dataclass(slots=True)
class Interpreter:
    """The process, and what it is connected by."""

    child: Child
    channel: socket.socket
    frames: Frames = field(default_factory=Frames)
    answer: Head | None = None
    broken: bool = False
    """Whether it closed the channel, or sent what is no frame."""

    def listen(self, call: int) -> bool:
        """Read the answer to a call; what answers another is forged or late. Return whether there can be more."""
        try:
            data = self.channel.recv(CHUNK)
            self.frames.feed(data)
            while (frame := self.frames.pop()) is not None:
                if frame[0].get("id") == call:
                    self.answer = frame[0]
        except BlockingIOError:
            return True
        except (OSError, FrameError):
            data = b""
        self.broken = not data
        return not self.broken

    def close(self) -> None:
        """Close this side's ends."""
        self.channel.close()
        self.child.close()


def start(family: Family, home: str) -> Interpreter:
    """Start an interpreter with nothing in it.

    Raises:
        OSError: if there can't be another process.
    """

    def run() -> None:
        os.chdir(home)
        worker.serve(EXTRA_FD)

    ours, theirs = socket.socketpair()
    with theirs:
        try:
            child = family.start(run, extra=theirs.fileno())
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    child.close_stdin()
    return Interpreter(child, ours)
