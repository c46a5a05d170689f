"""Frames of the agent's protocol: a JSON object and raw bytes, with their lengths in front.

    uint32 length of the head, uint32 length of the body (both big-endian) | head: JSON, UTF-8 | body

Both sides read what they don't trust, so every length has a limit, and a frame that is none is a `FrameError`.
"""

from __future__ import annotations

import json
import os
import socket
import struct

Head = dict[str, object]

_LENGTHS = struct.Struct(">II")
MAX_HEAD = 4 * 1024 * 1024
MAX_BODY = 64 * 1024 * 1024
CHUNK = 64 * 1024
"""Bytes asked for in one read: what a pipe holds, and still below what malloc asks the kernel for each time."""


class FrameError(ValueError):
    """A malformed or forged frame."""


def pack(head: Head, body: bytes = b"") -> bytes:
    """Return a frame's bytes.

    Raises:
        FrameError: if it is larger than the other side would take.
    """
    text = json.dumps(head).encode()
    _check(len(text), len(body))
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Read bytes and descriptors from a Unix socket."""
    data, fds, _, _ = socket.recv_fds(connection, CHUNK, 4, socket.MSG_CMSG_CLOEXEC)
    return data, fds


class Frames:
    """Cuts a stream into frames, and refuses those that are too large."""

    def __init__(self, max_head: int = MAX_HEAD, max_body: int = MAX_BODY) -> None:
        self._buffer = bytearray()
        self._limits = max_head, max_body

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._buffer += data

    def pop(self) -> tuple[Head, bytes] | None:
        """Return the next frame; None if it isn't complete yet.

        Raises:
            FrameError: if what arrived is no frame.
        """
        buffer = self._buffer
        if len(buffer) < _LENGTHS.size:
            return None
        n_head, n_body = _LENGTHS.unpack_from(buffer)
        _check(n_head, n_body, *self._limits)
        middle = _LENGTHS.size + n_head
        if len(buffer) < middle + n_body:
            return None
        try:
            head = json.loads(buffer[_LENGTHS.size : middle])
        except (ValueError, RecursionError) as error:
            raise FrameError(f"the head of a frame is not JSON: {error}") from None
        if not isinstance(head, dict):
            raise FrameError(f"the head of a frame is a {type(head).__name__}, not an object")
        body = bytes(buffer[middle : middle + n_body])
        del buffer[: middle + n_body]
        return head, body


def _check(n_head: int, n_body: int, max_head: int = MAX_HEAD, max_body: int = MAX_BODY) -> None:
    if n_head > max_head or n_body > max_body:
        raise FrameError(f"a frame of {n_head} + {n_body} bytes; at most {max_head} + {max_body} are allowed")
