"""The stream of an attached container: Docker puts a header before each piece, which says whether it is stderr."""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">BxxxL")
_STDERR = 2
_KEPT = 2000


class Demultiplexer:
    """Takes stdout out of what arrives; the last of stderr is kept as the agent's complaint."""

    def __init__(self) -> None:
        self.complaint = ""
        self._buffer = bytearray()
        self._kind, self._left = 0, 0

    def feed(self, data: bytes) -> bytes:
        """Take what was read, whatever it is a part of; return the part that is stdout."""
        self._buffer += data
        out = []
        while self._left or len(self._buffer) >= _HEADER.size:
            if not self._left:
                self._kind, self._left = _HEADER.unpack_from(self._buffer)
                del self._buffer[: _HEADER.size]
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            self._left -= len(piece)
            if self._kind == _STDERR:
                self.complaint = (self.complaint + piece.decode(errors="backslashreplace"))[-_KEPT:]
            else:
                out.append(piece)
            if not self._buffer:
                break
        return b"".join(out)
