"""Frames on their way into a socket: each is sent whole, whatever becomes of the call that asked for it."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Outgoing:
    """A frame that waits to be sent."""

    rest: memoryview
    """What is left of it."""
    fds: Sequence[int]
    """Descriptors that go with its first byte."""
    is_begun: bool = False


class SendQueue:
    """The frames that a socket has had no room for yet, in their order.

    No task waits for them, so none can be cancelled halfway through one, after which the other side could read no
    other; and none is left waiting for a socket that was closed.

    Args:
        sock: doesn't block.
        broken: called, once, with what keeps anything from being sent.
    """

    def __init__(self, sock: socket.socket, broken: Callable[[OSError], None]) -> None:
        self._sock, self._broken = sock, broken
        self._waiting: deque[Outgoing] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_writer = self._is_closed = False

    def use(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for room in this loop from now on."""
        self._watch(False)
        self._loop = loop
        self._watch(bool(self._waiting))

    def put(self, data: bytes, fds: Sequence[int] = ()) -> Outgoing:
        """Send a frame as soon as there is room; who cares for its descriptors withdraws it before closing them."""
        frame = Outgoing(memoryview(data), fds)
        if data and not self._is_closed:
            self._waiting.append(frame)
            if len(self._waiting) == 1:
                self._send()
        return frame

    def withdraw(self, frame: Outgoing) -> bool:
        """Don't send a frame; return False if a part of it was sent, or all."""
        if frame.is_begun or frame not in self._waiting:
            return False
        self._waiting.remove(frame)
        self._watch(bool(self._waiting))
        return True

    def close(self) -> None:
        """Send nothing any more: the socket is about to be closed, and another may have its descriptor's number."""
        self._is_closed = True
        self._waiting.clear()
        self._watch(False)

    def _send(self) -> None:
        """Send what there is room for."""
        try:
            while self._waiting:
                frame = self._waiting[0]
                if frame.fds and not frame.is_begun:
                    sent = socket.send_fds(self._sock, [frame.rest], frame.fds)
                else:
                    sent = self._sock.send(frame.rest)
                frame.is_begun, frame.rest = True, frame.rest[sent:]
                if not frame.rest:
                    self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close()
            self._broken(error)
        self._watch(bool(self._waiting))

    def _watch(self, wanted: bool) -> None:
        """Have the loop say when there is room, or not."""
        if self._loop is None or self._loop.is_closed():
            self._is_writer = False
        elif wanted and not self._is_writer:
            self._loop.add_writer(self._sock, self._send)
            self._is_writer = True
        elif self._is_writer and not wanted:
            self._loop.remove_writer(self._sock)
            self._is_writer = False
