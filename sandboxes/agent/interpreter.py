"""The stateful Python interpreter from outside: for the agent, or for a host with a direct line to the worker.

`worker` is the other side. An `Interpreter` holds this side's ends of its connections; the process is the
agent's.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from typing import cast

from . import own_program, worker
from .frames import CHUNK, MAX_STRAYS, MAX_TEXT, MAX_TEXT_BYTES, FrameError, Frames, Head, pack
from .plots import MAX_PLOTS, TEXTS, answer_from_body
from .process_tree import ProcessTree
from .streams import Capture

_MAX_HEAD = 256
_MAX_BODY = len(TEXTS) * MAX_TEXT_BYTES + MAX_PLOTS
"""Bytes of an answer: its texts and its plots."""
FLOOD = f"the interpreter sent more than {MAX_STRAYS} answers that nobody had asked for"
Ends = tuple[int, int, int, int]
"""The descriptors that a worker is given: where requests come in, stdout, stderr, and where answers go out."""


@dataclass(slots=True)
class Interpreter:
    """This side's ends of the connections, none of which blocks.

    They are pipes, as code can send descriptors over a socket. A reader that discards one closes it, and closing a TCP
    connection with SO_LINGER can block for a minute.
    """

    requests: io.FileIO
    answers: io.FileIO
    out: io.FileIO
    err: io.FileIO
    frames: Frames = field(default_factory=lambda: Frames(_MAX_HEAD, _MAX_BODY))
    answer: Head | None = None
    broken: bool = False
    """Whether the worker closed the channel, or sent what is no frame, or too much that is no answer."""
    strays: int = 0
    """The frames in the present call that answer another one: forged, or late."""
    received: int = 0
    """Bytes of answers, in all calls."""

    def begin(self, call: int, code: bytes, keep: int) -> tuple[bytes, tuple[Capture, Capture]]:
        """Begin a call; return its request and the captures of its output."""
        self.answer, self.strays = None, 0
        captures = Capture(self.out.fileno(), keep), Capture(self.err.fileno(), keep)
        return pack({"id": call, "keep": min(keep, MAX_TEXT)}, code), captures

    def listen(self, call: int) -> bool:
        """Read once what may be the answer to a call; return whether there can be more."""
        try:
            data = os.read(self.answers.fileno(), CHUNK)
            self.received += len(data)
            self.frames.feed(data)
            while not self.flooded and (frame := self.frames.pop()) is not None:
                if self.answer is None and frame[0].get("id") == call:
                    self.answer = answer_from_body(*frame)[0]
                else:
                    self.strays += 1
            if self.flooded:
                raise FrameError(FLOOD)
        except BlockingIOError:
            return True
        except (OSError, FrameError):
            data = b""
        self.broken = not data
        return not self.broken

    @property
    def flooded(self) -> bool:
        """Whether more came than any answer."""
        return self.strays > MAX_STRAYS

    def outcome(self, expired: bool) -> Head:
        """Return how the call went, but for its output."""
        answer = self.answer or {}
        texts = {name: worker.shorten(cast("str | None", answer.get(name)), MAX_TEXT) for name in TEXTS}
        return {**texts, "plots": answer.get("plots", []), "lost": self.answer is None, "expired": expired}

    def close(self) -> None:
        """Close these ends: a worker that hears of it ends."""
        for end in (self.requests, self.answers, self.out, self.err):
            end.close()


def connect() -> tuple[Interpreter, Ends]:
    """Return an interpreter's connections: these ends, and those that its worker is to be started with.

    Raises:
        OSError: if there is no descriptor left for them; none is taken then.
    """
    fds = list[int]()
    try:
        for _ in range(4):
            fds += os.pipe2(os.O_CLOEXEC)
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    inner_requests, requests, answers, inner_answers, out, inner_out, err, inner_err = fds
    for fd in (requests, answers, out, err):
        os.set_blocking(fd, False)
    ours = Interpreter(io.FileIO(requests, "w"), io.FileIO(answers), io.FileIO(out), io.FileIO(err))
    return ours, (inner_requests, inner_out, inner_err, inner_answers)


def start(processes: ProcessTree, home: str, ends: Ends, *, forked: bool) -> int:
    """Start a worker with nothing in it, and close this process's copies of its ends; return the process's number.

    Args:
        processes: whose the worker will be.
        home: the folder that it starts in.
        ends: its ends of the connections.
        forked: whether it may be a fork of this process, with all that this holds in its memory: that takes a
            twentieth of the time that a program takes.

    Raises:
        OSError: if there can't be another process, or a file for its program.
    """

    def run() -> None:
        os.chdir(home)
        if not forked:
            own_program.become()
        worker.serve(4, 3)

    requests, out, err, answers = ends
    given = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), out, err, answers, requests]
    try:
        if not forked:
            given.append(own_program.file())
        return processes.start(run, given)
    finally:
        for fd in given:
            os.close(fd)
