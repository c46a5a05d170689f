"""Episode files: one line an episode, only ever appended to; `store.shards` says which files there are.

A crash can leave at most one unterminated last line. The reader leaves it out; the writer moves it aside before it
appends, because a line appended after a torn one would be lost with it. Damage anywhere else is an error with its line
number. Work is done in bytes throughout, as a tear can split a UTF-8 character. An id that stands twice (a file put
together from two) is read once, the first time, with a warning.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store.codec import dump_line, load_line
from agent_rl.store.images import ImageFolder
from agent_rl.store.rotation import SHARD_BYTES, ShardWriter
from agent_rl.store.shards import (
    Place,
    Shard,
    describe,
    episode_file,
    existing_shards,
    line_at,
    read_from,
    shard_at,
)
from agent_rl.store.sidecar import ExpertsFile

_ID = re.compile(rb'\{"schema":\d+,"id":"([^"\\]+)"')  # how every line that dump_line wrote begins, save for odd ids
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class EpisodeWriter(ShardWriter):
    """Appends episodes to one file; at most one writer a file, any number of threads."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        experts: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Open the file (and make it where it is new), lock it, and move a torn tail aside.

        Args:
            path: an episode file or a run's directory.
            name: of a further writer of this run, which has a file of its own: `episodes.<name>.jsonl`.
            experts: whether to keep the routed experts, in a file beside: hundreds of bytes a token.
            shard_bytes: how large the file is closed as a shard.

        Raises:
            StoreError: if another writer has the file open, or the name can't be a file's.
        """
        file = episode_file(path)
        if name:
            if not _NAME.fullmatch(name):
                raise StoreError(f"a writer can't have the name {name!r}: use letters, digits, '.', '_' and '-'")
            file = file.with_name(f"{file.name.removesuffix('.jsonl')}.{name}.jsonl")
        self._experts = ExpertsFile(file.with_suffix(".experts")) if experts else None
        self._images = ImageFolder(file.parent)
        super().__init__(file, shard_bytes)

    def write(self, episode: Episode) -> None:
        """Append one episode; it outlives this process from here on, and the machine after `flush`.

        Raises:
            StoreError: if the episode can't be written as JSON, or the writer is closed.
            OSError: if the disk refuses; the file is then as it was.
        """
        experts = self._experts.keep if self._experts else None
        self.write_line(dump_line(episode, experts=experts, images=self._images.keep))

    def flush(self) -> None:
        """Wait until everything written so far is on the disk itself."""
        if self._experts:
            self._experts.flush()
        self._images.flush()
        super().flush()

    def close(self) -> None:
        """Give the files back once all shards are compressed; more than once is fine."""
        super().close()
        if self._experts:
            self._experts.close()


def read_episodes(path: str | os.PathLike[str], *, experts: bool = False) -> Iterator[Episode]:
    """Return the episodes of a file or run directory, in order, read one at a time.

    Args:
        path: an episode file or a run's directory.
        experts: whether to read the routed experts, too, where they were kept.

    Raises:
        StoreError: if there is no such file, or a line has another schema.
        DamagedEpisodeError: if a line can't be read; the message says which.
    """
    return (parse_line(path, place, line, experts=experts) for place, line in unique_lines(path))


def locate_episodes(path: str | os.PathLike[str]) -> Iterator[tuple[Place, Episode]]:
    """Return the episodes as `read_episodes` does, each with its place, where `episode_at` finds it."""
    return ((place, parse_line(path, place, line)) for place, line in unique_lines(path))


def episode_at(path: str | os.PathLike[str], place: Place, *, experts: bool = False) -> Episode:
    """Return the episode at a place from `locate_episodes`, with its routed experts if they are asked for.

    Raises:
        StoreError: if there is no such file, or a line has another schema.
        DamagedEpisodeError: if no whole episode begins there.
    """
    try:
        return load_line(line_at(path, place), shard_at(path, place).file.parent, experts=experts)
    except DamagedEpisodeError as error:
        file = shard_at(path, place).path
        raise DamagedEpisodeError(f"{file}: no episode begins at byte {place.offset}: {error}") from error


def unique_lines(path: str | os.PathLike[str]) -> Iterator[tuple[Place, bytes]]:
    """Return every whole line but those that repeat an id, each with its place.

    Raises:
        StoreError: if there is no such file.
    """
    return _unique(path, existing_shards(path))


def _unique(path: str | os.PathLike[str], shards: Sequence[Shard]) -> Iterator[tuple[Place, bytes]]:
    seen: set[str] = set()
    repeated: list[Place] = []
    for place, line in _lines(shards):
        if (found := _line_id(path, place, line)) in seen:
            repeated.append(place)
            continue
        seen.add(found)
        yield place, line
    if repeated:
        lines = ", ".join(describe(path, place) for place in repeated[:5]) + (", ..." if len(repeated) > 5 else "")
        warnings.warn(
            f"{path}: {plural(len(repeated), 'line')} left out for an id that is further up: {lines}", stacklevel=2
        )


def parse_line(path: str | os.PathLike[str], place: Place, line: bytes, *, experts: bool = False) -> Episode:
    """Return the episode of a line, as `load_line` does; its errors name the file and the line's number."""
    try:
        return load_line(line, shard_at(path, place).file.parent, experts=experts)
    except DamagedEpisodeError as error:
        raise DamagedEpisodeError(
            f"{describe(path, place)}: {error}. The lines before and after it are untouched; delete this one to read "
            "them"
        ) from error
    except StoreError as error:
        raise StoreError(f"{describe(path, place)}: {error}") from error


def _lines(shards: Iterable[Shard]) -> Iterator[tuple[Place, bytes]]:
    return (found for shard in shards for found in read_from(shard))


def _line_id(path: str | os.PathLike[str], place: Place, line: bytes) -> str:
    match = _ID.match(line)
    if match is None:
        return parse_line(path, place, line).id
    try:
        return match[1].decode()
    except UnicodeDecodeError as error:
        raise DamagedEpisodeError(f"{describe(path, place)}: the id is not UTF-8: {error}") from error
