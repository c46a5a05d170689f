"""A relay between a process's pipes and a server in the sandbox: a stream, from inside.

It is a process of its own, as confined as foreign code is: so it reaches what that could reach, and no descriptor of
a connection ever leaves the sandbox. It says by a first byte that it is connected.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time

from .frames import CHUNK

CONNECTED = b"\n"
_RETRY = 0.02
"""Seconds between two attempts, as a server that was just started listens soon."""
_NOBODY_YET = (errno.ECONNREFUSED, errno.ENOENT)
NO_SOCKETS = "this kind of sandbox has no sockets: without a network of its own, its ports would be the host's"


def relay(address: int | str, timeout: float) -> None:
    """Connect, and relay between stdin and stdout and the server until that has closed the connection.

    Raises:
        OSError: if nothing listens there within so many seconds.
    """
    server = _connect(address, time.monotonic() + timeout)
    os.write(1, CONNECTED)
    for fd in (0, 1, server.fileno()):
        os.set_blocking(fd, False)
    there, back = _Way(0, server.fileno()), _Way(server.fileno(), 1)
    try:
        while not back.is_over:  # neither way may hold up the other
            events = select.poll()
            for fd in (*there.wants(), *back.wants()):
                events.register(fd, there.wants().get(fd, 0) | back.wants().get(fd, 0))
            events.poll()
            there.move()
            back.move()
            if there.is_over and not there.told:
                there.told = True
                server.shutdown(socket.SHUT_WR)
    except OSError:  # the server has broken the connection, or nobody reads here: either way, it is over
        return


class _Way:
    """One direction: from a descriptor to another."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._left = b""
        self._is_read = self.told = False

    @property
    def is_over(self) -> bool:
        """Whether all has been written that there will be."""
        return self._is_read and not self._left

    def wants(self) -> dict[int, int]:
        """Return what to wait for."""
        if self._left:
            return {self._target: select.POLLOUT}
        return {} if self._is_read else {self._source: select.POLLIN}

    def move(self) -> None:
        """Read and write what can be."""
        try:
            if not self._left and not self._is_read:
                self._left = os.read(self._source, CHUNK)
                self._is_read = not self._left
            if self._left:
                self._left = self._left[os.write(self._target, self._left) :]
        except BlockingIOError:
            return


def _connect(address: int | str, expires: float) -> socket.socket:
    try:
        server = socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX)
    except OSError as error:
        raise OSError(NO_SOCKETS if error.errno == errno.EAFNOSUPPORT else str(error)) from None
    while True:
        try:
            server.connect(("127.0.0.1", address) if isinstance(address, int) else address)
            return server
        except OSError as error:
            if error.errno not in _NOBODY_YET or time.monotonic() >= expires:
                raise OSError(f"nothing listens at {address}: {error.strerror or error}") from None
        time.sleep(_RETRY)
