"""Frames of the agent's protocol: a JSON object and raw bytes, with their lengths in front.

    uint32 length of the head, uint32 length of the body (both big-endian) | head: JSON, UTF-8 | body

Both sides read what they don't trust, so every length has a limit, and a frame that is none is a `FrameError`. An
answer's head is small, so that it takes no time to decode, however it is nested: texts of any size are in the body.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence

Head = dict[str, object]

_LENGTHS = struct.Struct(">II")
MAX_HEAD = 4 * 1024 * 1024
"""Bytes of the head of a request, which has the arguments of a command and its environment."""
MAX_ANSWER_HEAD = 64 * 1024
"""Bytes of the head of an answer, whose longest text is why a file can't be read."""
MAX_STRAYS = 128
"""Frames that answer no call, until their sender is held to be flooding: a late answer is one of them."""
MAX_BODY = 64 * 1024 * 1024
PART = 256 * 1024
"""Bytes of a part of an answer's body, at least: all but its rest are sent as they come, and held nowhere."""
MAX_TEXT = 64 * 1024
"""Characters kept of a value and of a traceback, at most."""
MAX_TEXT_BYTES = 6 * MAX_TEXT + 256
"""Bytes of such a text: of characters that take six, and the line in its gap."""
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


def texts_to_body(head: Head, body: bytes, names: Sequence[str]) -> tuple[Head, bytes]:
    """Move these texts of a head, if they are not None, to the end of its body; their lengths stay in the head."""
    texts = {name: str(head[name]).encode(errors="backslashreplace") for name in names if head[name] is not None}
    return {**head, **{name: len(text) for name, text in texts.items()}}, b"".join((body, *texts.values()))


def texts_from_body(head: Head, body: bytes, names: Sequence[str]) -> tuple[Head, bytes]:
    """Undo `texts_to_body`.

    Raises:
        FrameError: if the body is too short for them, a length is none or too large, or a text is no UTF-8: to replace
            what is none would take a hundred times as long.
    """
    texts: Head = {}
    end = len(body)
    for name in reversed(names):
        size = head.get(name)
        if size is None:
            texts[name] = None
            continue
        if not isinstance(size, int) or not 0 <= size <= min(end, MAX_TEXT_BYTES):
            raise FrameError(f"an answer of {len(body)} bytes has {name}={size!r:.100}")
        try:
            texts[name] = body[end - size : end].decode()
        except UnicodeDecodeError as error:
            raise FrameError(f"the {name} of an answer is no UTF-8: {error.reason}") from None
        end -= size
    return {**head, **texts}, body[:end]


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Frames:
    """Cuts a stream into frames, and refuses those that are too large."""

    def __init__(self, max_head: int = MAX_HEAD, max_body: int = MAX_BODY) -> None:
        self._buffer = bytearray()
        self._limits = max_head, max_body

    @property
    def has_more(self) -> bool:
        """Whether bytes have come that `pop` has not returned."""
        return bool(self._buffer)

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
            head = json.loads(buffer[_LENGTHS.size : middle].decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise FrameError(f"the head of a frame is not JSON: {error}") from None
        if not isinstance(head, dict):
            raise FrameError(f"the head of a frame is a {type(head).__name__}, not an object")
        with memoryview(buffer) as view:  # a slice of the buffer would be one more copy
            body = bytes(view[middle : middle + n_body])
        del buffer[: middle + n_body]
        return head, body


def _check(n_head: int, n_body: int, max_head: int = MAX_HEAD, max_body: int = MAX_BODY) -> None:
    if n_head > max_head or n_body > max_body:
        raise FrameError(f"a frame of {n_head} + {n_body} bytes; at most {max_head} + {max_body} are allowed")
