"""A process's streams: input fed as it is taken, output drained and kept in part."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from collections.abc import Callable, Sequence

from .frames import CHUNK, PART, Head


class Capture:
    """What is kept of one stream: up to `keep` bytes, half of them from its end if there were more."""

    def __init__(self, fd: int, keep: int) -> None:
        self.fd = fd
        self.total = 0
        self._tail_size = keep // 2
        self._head_size = keep - self._tail_size
        self._head, self._tail = bytearray(), bytearray()

    @property
    def cut(self) -> bool:
        """Whether the middle was dropped."""
        return self.total > self._head_size + self._tail_size

    def drain(self) -> bool:
        """Read once from a non-blocking descriptor; return False at its end."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return True
        self.add(data)
        return bool(data)

    def drain_all(self) -> None:
        """Read all that is there now, and no more: the writer may continue."""
        left = int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        while left > 0:
            before = self.total
            self.drain()
            if self.total == before:
                return
            left -= self.total - before

    def add(self, data: bytes) -> None:
        """Take the next part of the stream."""
        self.total += len(data)
        room = self._head_size - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, 0) :]
        if len(self._tail) > 2 * self._tail_size + CHUNK:  # not at every part: that would copy the tail each time
            self._trim()

    def take(self) -> bytes:
        """Return what was kept, with a line in the gap, and start afresh."""
        if not self.total:
            return b""
        self._trim()
        gap = b"\n[... %d bytes left out ...]\n" % (self.total - len(self._head) - len(self._tail)) if self.cut else b""
        kept = b"".join((self._head, gap, self._tail))
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()
        return kept

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_size)]


class Parts(Capture):
    """A stream that is passed on in parts, so that the memory of the sandbox holds one of them at a time, or less."""

    def __init__(self, fd: int, send: Callable[[bytes], None]) -> None:
        super().__init__(fd, 0)
        self._send = send
        self._part = bytearray()

    def add(self, data: bytes) -> None:
        """Take the next bytes, and pass a part on if there is one."""
        self.total += len(data)
        self._part += data
        if len(self._part) >= PART:
            self._send(self._take())

    def take(self) -> bytes:
        """Return what was not passed on."""
        self.total = 0
        return self._take()

    def _take(self) -> bytes:
        part = bytes(self._part)
        self._part.clear()
        return part


def take_all(answer: Head, captures: Sequence[Capture]) -> tuple[Head, bytes]:
    """Return an answer with the output of a call, stdout and stderr, as the agent's protocol has it."""
    cut = any(capture.cut for capture in captures)
    out, err = (capture.take() for capture in captures)
    return {**answer, "out": len(out), "cut": cut}, out + err


class Feed:
    """Bytes to write to a non-blocking descriptor."""

    def __init__(self, fd: int, data: bytes, close: Callable[[], None] = lambda: None) -> None:
        self.fd = fd
        self._left = memoryview(data)
        self._close = close
        """Called when all is written, or the reader is gone."""

    def push(self) -> bool:
        """Write what there is room for; return whether there is more."""
        try:
            while self._left:
                self._left = self._left[os.write(self.fd, self._left) :]
        except BlockingIOError:
            return True
        except OSError:  # the reader is gone
            self._left = self._left[:0]
        self._close()
        return False
