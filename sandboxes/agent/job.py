"""A process that outlives a call, from the agent's side: its input, and the last of its output."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass, field

from .frames import CHUNK, Head
from .request import Request

MOST = 32
"""Handles at a time."""
TAIL = 128 * 1024
"""Bytes kept of each output."""
PIECE = CHUNK
"""Bytes that one answer brings, and that wait to be written to an input, at most."""


class Tape:
    """A stream of output: a window of it, by the position in the whole."""

    def __init__(self, fd: int, *, drops: bool) -> None:
        self.fd, self.drops = fd, drops
        self.start = 0
        """Of the window: how many bytes came before."""
        self.kept = bytearray()
        self.ended = False

    @property
    def end(self) -> int:
        """How many bytes came."""
        return self.start + len(self.kept)

    @property
    def is_wanted(self) -> bool:
        """Whether more should be read now."""
        return not self.ended and (self.drops or len(self.kept) < PIECE)

    def fill(self) -> None:
        """Read once."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO: the last of a pty's other side has closed it
            data = b""
        self.kept += data
        if not data:
            self.close()
        elif self.drops and len(self.kept) > 2 * TAIL:  # not at every read: that would copy the window each time
            self._forget(len(self.kept) - TAIL)

    def fill_last(self) -> None:
        """Read what is there of a process that has ended, and no more than is kept: others may hold the other side."""
        until, before = self.end + TAIL, -1
        while not self.ended and before < self.end < until:  # a terminal gives some 4 KiB at a time
            before = self.end
            self.fill()
        self.close()

    def since(self, at: int, size: int) -> tuple[int, bytes]:
        """Return the bytes from a position on, or from the first that is kept, and that position."""
        if self.drops:
            self._forget(len(self.kept) - TAIL)
        else:
            self._forget(at - self.start)
        at = min(max(at, self.start), self.end)
        first = at - self.start
        return at, bytes(self.kept[first : first + size])

    def close(self) -> None:
        """Read no more."""
        if not self.ended:
            self.ended = True
            os.close(self.fd)

    def _forget(self, size: int) -> None:
        size = min(max(0, size), len(self.kept))
        del self.kept[:size]
        self.start += size


@dataclass(slots=True)
class Job:
    """A process, and this side's ends of its connections."""

    pid: int
    stdin: int
    """-1: closed."""
    out: Tape
    err: Tape
    terminal: bool
    code: int | None = None
    unwritten: bytearray = field(default_factory=bytearray)
    is_shut: bool = False
    """Whether the input ends after what is unwritten."""
    orders: dict[int, Request] = field(default_factory=dict)
    """Those that wait, by id."""
    watched: dict[int, int] = field(default_factory=dict)
    """What is waited for, by descriptor."""

    def wishes(self) -> dict[int, int]:
        """Return what to wait for, by descriptor."""
        wished = {tape.fd: select.EPOLLIN for tape in (self.out, self.err) if tape.is_wanted}
        if self.stdin >= 0:  # a terminal's is the descriptor of its output; 0: wait only for that its reader has gone
            wished[self.stdin] = wished.get(self.stdin, 0) | (select.EPOLLOUT if self.unwritten else 0)
        return wished

    def serve(self, fd: int, event: int) -> None:
        """Read or write, as the descriptor can."""
        for tape in (self.out, self.err):
            if fd == tape.fd and not tape.ended and event & ~select.EPOLLOUT:
                tape.fill()
        if self.terminal and self.out.ended:
            self.close_stdin()
        if fd == self.stdin:
            if event & select.EPOLLERR and not self.terminal:
                self.close_stdin()
            self.write()

    def write(self) -> None:
        """Write what there is room for."""
        try:
            while self.unwritten:
                del self.unwritten[: os.write(self.stdin, self.unwritten)]
        except BlockingIOError:
            return
        except OSError:  # the reader has gone
            self.close_stdin()
        if self.is_shut:
            self.close_stdin()

    def close_stdin(self) -> None:
        """Write no more."""
        if self.stdin >= 0 and not self.terminal:
            os.close(self.stdin)
        self.stdin = -1
        self.unwritten.clear()

    def close(self) -> None:
        """Close the connections."""
        self.close_stdin()
        self.out.close()
        self.err.close()

    def answer(self, order: Request, hurry: bool = False) -> tuple[Head, bytes] | None:
        """Return the answer to what may wait; None if it has to."""
        if order.op == "give":
            return self._take_in(order, hurry)
        if order.op == "wait":
            return ({"code": self.code}, b"") if hurry or self.code is not None else None
        at, data = self.out.since(order.at, min(order.keep, PIECE))
        ended = self.out.ended and at + len(data) == self.out.end
        return ({"at": at, "ended": ended}, data) if hurry or data or ended else None

    def _take_in(self, order: Request, hurry: bool) -> tuple[Head, bytes] | None:
        if self.stdin < 0 or self.is_shut:
            return {"problem": "its input is closed"}, b""
        if len(self.unwritten) + len(order.body) > PIECE and self.unwritten:
            return ({"problem": "it did not read what was written within the time"}, b"") if hurry else None
        self.unwritten += order.body
        self.write()
        return {"problem": None}, b""
