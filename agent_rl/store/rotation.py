"""Rotation: a file of lines that has grown large is closed as a shard and compressed, while its writer continues.

The file is renamed; its compressed form is written beside it, and renamed when it is on the disk; the plain one is
removed. Between these steps every line is in exactly one shard of `shards_of`, so that a crash neither loses nor
repeats one. The next writer finishes them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent_rl.errors import StoreError
from agent_rl.store.frames import compress_lines
from agent_rl.store.lines import LineWriter, append, open_locked, sync
from agent_rl.store.shards import Place, Shard, read_from, shards_of
from agent_rl.store.tail import heal, set_aside

SHARD_BYTES = 256 << 20
_CHUNK = 1 << 20


class ShardWriter(LineWriter):
    """Appends lines to one file, and closes it as a shard when it is large; a thread compresses it."""

    def __init__(self, path: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Open the file as `LineWriter` does, and finish the shards that a killed writer had begun to close.

        Args:
            path: the file; its shards are beside it.
            shard_bytes: how large it is closed.

        Raises:
            StoreError: if another writer has the file open.
        """
        self._shard_bytes = shard_bytes
        self._thread = ThreadPoolExecutor(1, "close-shards")
        super().__init__(path)
        try:
            self._shard = shards_of(path)[-1]
            for shard in shards_of(path)[:-1]:
                self._finish_closing(shard)
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> Place:
        """Where the next line will begin."""
        with self._lock:
            return Place(self._shard.name, os.fstat(self._open_fd()).st_size)

    def cut(self, place: Place) -> Path | None:
        """Move all lines from a place on into a file `<path>.undone-<n>`; return it, or None if there are none.

        It may be interrupted and repeated: no line is removed before it is in that file.

        Raises:
            StoreError: if the shard of the place is gone.
        """
        with self._lock:
            fd = self._open_fd()
            self._wait()
            first = Shard(self.path, int(place.shard.rpartition("-")[2]))
            later = [shard for shard in shards_of(self.path) if shard >= first]
            if later and later[0] != first:
                raise StoreError(f"{self.path} can't be cut at {place}: this shard is gone")
            if not any(True for _ in _lines(later, place)):
                return None
            aside = set_aside(self.path, "undone", _lines(later, place))
            if first == self._shard:
                os.ftruncate(fd, place.offset)
                return aside
            os.ftruncate(fd, 0)
            for shard in reversed(later[1:-1]):
                shard.remove()
            with first.open() as kept:
                for at in range(0, place.offset, _CHUNK):
                    append(fd, kept.read(min(_CHUNK, place.offset - at)))
            os.fsync(fd)
            first.remove()
            self._shard = first
            return aside

    def flush(self) -> None:
        """Wait until everything written so far is on the disk itself."""
        super().flush()
        self._wait()

    def close(self) -> None:
        """Give the file back once its shards are compressed; more than once is fine."""
        super().close()
        self._thread.shutdown()

    def _append(self, line: bytes) -> None:
        if os.fstat(self._open_fd()).st_size >= self._shard_bytes:
            self._rotate()
        super()._append(line)

    def _rotate(self) -> None:
        plain = self._shard.closed[1]
        self.path.rename(plain)
        try:
            fd = open_locked(self.path, wait=True)  # one that would open it meanwhile finds the closed one locked
        except BaseException:
            plain.rename(self.path)
            raise
        closed, self._fd = self._open_fd(), fd
        self._thread.submit(_compress, self._shard, closed)
        self._shard = Shard(self.path, self._shard.number + 1)

    def _finish_closing(self, shard: Shard) -> None:
        """Compress a shard that a killed writer left plain; its last line may be torn if the machine failed."""
        try:
            fd = open_locked(shard.closed[1], make=False)
        except FileNotFoundError:
            return
        heal(fd, shard.closed[1])
        self._thread.submit(_compress, shard, fd)

    def _wait(self) -> None:
        self._thread.submit(int).result()  # the last of one thread's tasks


def _compress(shard: Shard, fd: int) -> None:
    """Replace a shard's plain file, which `fd` holds locked, by its compressed form."""
    compressed, plain = shard.closed
    partial = compressed.with_name(f"{compressed.name}.tmp")
    try:
        if not compressed.exists():
            with partial.open("wb") as target:
                compress_lines((line for _, line in read_from(shard)), target)
            sync(partial)
            partial.rename(compressed)
            sync(compressed.parent)
        plain.unlink()
    except OSError as error:
        warnings.warn(f"{plain} is not compressed yet, but can be read as it is: {error}", stacklevel=2)
    finally:
        os.close(fd)


def _lines(shards: list[Shard], place: Place) -> Iterator[bytes]:
    return (line for s in shards for _, line in read_from(s, place.offset if s.name == place.shard else 0))
