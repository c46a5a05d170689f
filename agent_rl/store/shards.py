"""Shards: a writer's open file, and those that it closed before.

    episodes.jsonl                       the run's own writer
    episodes-00001.jsonl.zst             what it closed before, oldest first
    episodes.worker-3.jsonl              a further writer
    episodes.worker-3-00001.jsonl.zst

A shard has its number from the beginning: the open one that after the last closed. So a place stays true when the
shard is closed. Its file is looked for whenever it is read, as it may be closed at any time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

from agent_rl.errors import ConfigError, StoreError
from agent_rl.store.frames import open_frames

FILE_NAME = "episodes.jsonl"
_CLOSED = re.compile(r"(?P<stem>.+)(-(?P<number>\d{5})\.jsonl\.zst|\.jsonl\.closed-(?P<closing>\d{5}))", re.DOTALL)
_WRITER = re.compile(r"(?P<stem>episodes(\..+)?)\.jsonl", re.DOTALL)


class Place(NamedTuple):
    """Where a line is; true as long as its store is only written to."""

    shard: str
    """The shard's name, such as "episodes-00001"."""
    offset: int
    """Where the line begins in the shard, in bytes before compression."""


def refuse_device(file: Path) -> None:
    """Refuse a path whose pipe or device a new file would replace.

    Raises:
        ConfigError: if there is one.
    """
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is a pipe or a device: name a file")


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Some of a writer's lines, in one file."""

    file: Path
    """What the writer appends to."""
    number: int

    @property
    def name(self) -> str:
        """The same before and after it is closed."""
        return f"{self.file.name.removesuffix('.jsonl')}-{self.number:05d}"

    @property
    def closed(self) -> tuple[Path, Path]:
        """Its file when it is closed: compressed, and until then."""
        plain = f"{self.file.name}.closed-{self.number:05d}"
        return self.file.with_name(f"{self.name}.jsonl.zst"), self.file.with_name(plain)

    @property
    def is_closed(self) -> bool:
        """Whether the writer is done with it."""
        compressed, plain = self.closed
        return compressed.exists() or plain.exists() or compressed.exists()  # compressed in between

    @property
    def path(self) -> Path:
        """Where it is now."""
        return next((file for file in self.closed if file.exists()), self.file)

    def remove(self) -> None:
        """Remove its files, where it is closed."""
        for file in self.closed:
            file.unlink(missing_ok=True)

    def open(self) -> BinaryIO:
        """Open its file, wherever it is now.

        Raises:
            FileNotFoundError: if it is gone.
        """
        while True:
            for file in self.closed:
                try:
                    return _open(file)
                except FileNotFoundError:
                    pass
            try:
                found = _open(self.file)
            except FileNotFoundError:
                if self.is_closed:
                    continue
                raise
            if _open_number(self.file) == self.number:
                return found
            found.close()
            if not self.is_closed:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.closed[0]))


def episode_file(path: str | os.PathLike[str]) -> Path:
    """Return the episode file that a path means: itself, or `episodes.jsonl` in a run's directory."""
    path = Path(path)
    is_file = path.suffix == ".jsonl" or (path.exists() and not path.is_dir())
    return path if is_file and not path.is_dir() else path / FILE_NAME


def shards_of(path: str | os.PathLike[str]) -> list[Shard]:
    """Return what there is: of a file, with the shards closed before it; of a run's directory, every writer's.

    Writers are in the order of their names, a writer's shards in the order they were written. There are none where
    nothing was written yet.
    """
    path = Path(path)
    if path.is_dir():
        matches = (_WRITER.fullmatch(name) or _CLOSED.fullmatch(name) for name in _names(path))
        stems = {found["stem"] for found in matches if found}
        writers = [path / f"{stem}.jsonl" for stem in sorted(stems) if _WRITER.fullmatch(f"{stem}.jsonl")]
        return [shard for file in writers for shard in _shards_of_writer(file)]
    if closed := _CLOSED.fullmatch(path.name):
        only = Shard(path.with_name(f"{closed['stem']}.jsonl"), int(closed["number"] or closed["closing"]))
        return [only] if only.is_closed else []
    return _shards_of_writer(path)


def existing_shards(path: str | os.PathLike[str]) -> list[Shard]:
    """Return what `shards_of` does.

    Raises:
        StoreError: if nothing is there.
    """
    if found := shards_of(path):
        return found
    raise StoreError(f"there is no episode file {episode_file(path)}; give a .jsonl file or the directory of a run")


def shard_at(path: str | os.PathLike[str], place: Place) -> Shard:
    """Return the shard of a place in what a path means."""
    stem, _, number = place.shard.rpartition("-")
    file = episode_file(path)
    return Shard(file if file.name.removesuffix(".jsonl") == stem else file.with_name(f"{stem}.jsonl"), int(number))


def read_from(shard: Shard, offset: int = 0) -> Iterator[tuple[Place, bytes]]:
    """Yield a shard's whole lines from one on; the unterminated last line of a torn file is left out."""
    name = shard.name
    with shard.open() as handle:
        handle.seek(offset)
        for line in handle:
            if not line.endswith(b"\n"):
                return
            yield Place(name, offset), line
            offset += len(line)


def state_of(shard: Shard) -> str:
    """Return the size and the age of a shard's file: while they are the same, so is what is in it."""
    try:
        found = shard.path.stat()
    except FileNotFoundError:  # it is being closed
        return "unknown"
    return f"{found.st_size} {found.st_mtime_ns}"


def digest_of(line: bytes) -> bytes:
    """Return what tells a line from another one that was written in its place."""
    return hashlib.blake2b(line, digest_size=16).digest()


def line_at(path: str | os.PathLike[str], place: Place) -> bytes:
    """Return the line that begins at a place, or no bytes.

    Raises:
        StoreError: if its shard is gone.
    """
    shard = shard_at(path, place)
    try:
        return next((line for _, line in read_from(shard, place.offset)), b"")
    except FileNotFoundError as error:
        raise StoreError(f"{shard.file.with_name(place.shard)}: this shard of the episodes is gone") from error


def describe(path: str | os.PathLike[str], place: Place) -> str:
    """Return the file and the number of a line, from 1, for an error to name."""
    shard = shard_at(path, place)
    number = 1 + sum(1 for found, _ in read_from(shard) if found.offset < place.offset)
    return f"{shard.path}:{number}"


def _open(file: Path) -> BinaryIO:
    return open_frames(file) if file.suffix == ".zst" else file.open("rb")


def _shards_of_writer(file: Path) -> list[Shard]:
    last = _open_number(file)
    # the open one may be closed meanwhile: it is looked for where it was before it is where it will be
    shards = (Shard(file, n) for n in range(1, last + 1))
    return [shard for shard in shards if (shard.number == last and file.exists()) or shard.is_closed]


def _open_number(file: Path) -> int:
    """Return the number of the shard that is open; a closed one may be renamed meanwhile, and missing in the list."""
    stem = file.name.removesuffix(".jsonl")
    matches = map(_CLOSED.fullmatch, _names(file.parent))
    numbers = (int(found["number"] or found["closing"]) for found in matches if found and found["stem"] == stem)
    return next(n for n in count(max(numbers, default=0) + 1) if not Shard(file, n).is_closed)


def _names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []
