"""Compressed lines: independent zstd frames of whole lines, and where each is in zstd's own seek table.

Any zstd tool reads such a file. The table is the last of its frames, one that a decompressor skips: of each frame, the
sizes compressed and not, as `contrib/seekable_format` of zstd says. With it, one line costs one frame.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import zstandard

from agent_rl.errors import DamagedEpisodeError

FRAME = 1 << 20
"""The least of a frame's lines, before compression; the last frame may be smaller."""
LEVEL = 6
_SKIPPABLE = 0x184D2A5E
_HEADER = struct.Struct("<II")
_ENTRY = struct.Struct("<II")
_FOOTER = struct.Struct("<IBI")
_MAGIC = 0x8F92EAB1


def compress_lines(lines: Iterable[bytes], target: BinaryIO) -> None:
    """Write lines as frames, and the table of them."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    table = []
    for block in _blocks(lines):
        frame = compressor.compress(block)
        target.write(frame)
        table.append(_ENTRY.pack(len(frame), len(block)))
    entries = b"".join(table)
    target.write(_HEADER.pack(_SKIPPABLE, len(entries) + _FOOTER.size))
    target.write(entries + _FOOTER.pack(len(table), 0, _MAGIC))


def open_frames(file: Path) -> BinaryIO:
    """Open what `compress_lines` wrote as if it were not compressed.

    Raises:
        FileNotFoundError: if it is not there.
        DamagedEpisodeError: if it has no such table, or, when it is read, a frame is damaged.
    """
    return io.BufferedReader(_Frames(file, file.open("rb")), 1 << 16)


class _Frames(io.RawIOBase):
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        try:
            sizes = _read_table(self._file)
        except (OSError, ValueError, struct.error) as error:
            self._file.close()
            raise DamagedEpisodeError(
                f"{path} has no seek table: it is damaged, or another program wrote it"
            ) from error
        self._starts = list(accumulate((size for size, _ in sizes), initial=0))
        self._ends = list(accumulate(size for _, size in sizes))
        self._at, self._index, self._frame = 0, -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._ends[-1] if self._ends else 0}
        self._at = start[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        index = bisect_right(self._ends, self._at)
        if index == len(self._ends):
            return 0
        end = self._ends[index]
        frame = self._read(index)
        part = frame[len(frame) - (end - self._at) :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _read(self, index: int) -> memoryview:
        if index != self._index:
            begin, size = self._starts[index], self._ends[index] - (self._ends[index - 1] if index else 0)
            self._file.seek(begin)
            try:
                data = zstandard.ZstdDecompressor().decompress(self._file.read(self._starts[index + 1] - begin), size)
            except zstandard.ZstdError as error:
                raise DamagedEpisodeError(f"{self._path}: the frame at byte {begin} is damaged: {error}") from error
            if len(data) != size:
                raise DamagedEpisodeError(f"{self._path}: the frame at byte {begin} has {len(data)} bytes, not {size}")
            self._index, self._frame = index, data
        return memoryview(self._frame)


def _read_table(file: BinaryIO) -> list[tuple[int, int]]:
    """Return the sizes of the frames, compressed and not."""
    end = file.seek(-_FOOTER.size, io.SEEK_END)
    frames, flags, magic = _FOOTER.unpack(file.read(_FOOTER.size))
    if magic != _MAGIC or flags:
        raise ValueError("no seek table without checksums")
    file.seek(end - frames * _ENTRY.size)
    return list(_ENTRY.iter_unpack(file.read(frames * _ENTRY.size)))


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= FRAME:
            yield b"".join(block)
            block, size = [], 0
    if block:
        yield b"".join(block)
