"""Which episodes of a run to look at: those that fit, a text to find, an order; or one, by the beginning of its id."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.errors import StoreError, did_you_mean
from agent_rl.store.episodes import episode_at, parse_line
from agent_rl.store.heads import Head
from agent_rl.store.index import Index, open_index
from agent_rl.store.shards import Place, describe, line_at, read_from, shard_at, shards_of
from agent_rl.store.where import parse_where, sort_key

_HINTED = 10_000
"""The ids among which a mistyped one is looked for."""
_NEAR = 4_000_000
"""The bytes that are read through to a next line, rather than looked up."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of a path's episodes, and how many there are."""

    path: str | os.PathLike[str]
    places: Sequence[Place]
    ids: Sequence[str]
    fitting: int
    total: int

    @property
    def none(self) -> str:
        """What to say where none is chosen."""
        of = plural(self.total, "episode")
        if self.fitting:
            return (
                f"{self.fitting:,} of its {of} fit{'s' * (self.fitting == 1)}, and limit and offset leave none of them"
            )
        return f"none of its {of} fits" if self.total else "it has no episodes yet"

    def episodes(self) -> Iterator[Episode]:
        """Yield the episodes, read one at a time."""
        return (episode_at(self.path, place) for place in self.places)

    def heads(self) -> Iterator[Head]:
        """Yield their heads, by the index."""
        with open_index(self.path) as index:
            yield from index.heads(self.places)


def select(
    path: str | os.PathLike[str] | Index,
    *,
    where: Sequence[str] = (),
    search: str = "",
    sort: str | None = None,
    reverse: bool = False,
    limit: int = 20,
    offset: int = 0,
) -> Selection:
    """Return the episodes that fit, in the files' order or sorted, by the index.

    Args:
        path: an episode file or a run's folder, or its index.
        where: expressions, such as "reward < 0.5 and stop = turns", "id=train-00010-*"; all of them must hold.
        search: text in the id, the task, a message, a tool call or the error; the case of letters does not count.
        sort: a field; episodes without a value come last.
        reverse: whether the largest come first; without `sort`, the newest.
        limit: the most episodes to return.
        offset: how many of those that fit to leave out before.

    Raises:
        ConfigError: if an expression or an order has no meaning.
        StoreError: if there is no such file.
        DamagedEpisodeError: if a line can't be read.
    """
    if not isinstance(path, Index):
        parse_where(where), sort and sort_key(sort)  # before an index is made
        with open_index(path) as index:
            return select(index, where=where, search=search, sort=sort, reverse=reverse, limit=limit, offset=offset)
    index, fits = path, parse_where(where)
    _refuse_damage(index)
    _warn_of_repeated(index)
    among = None
    if search:
        fitting = (place for place, _ in index.places(fits))
        among = [place for place, line in _lines(index.path, fitting) if _says(line, search)]
    order = sort_key(sort) if sort else None
    found = index.places(fits, order, reverse=reverse, limit=limit, offset=offset, among=among)
    count = index.count(fits) if among is None else len(among)
    return Selection(index.path, [place for place, _ in found], [id for _, id in found], count, index.total)


def find_episode(path: str | os.PathLike[str], episode_id: str, *, experts: bool = False) -> Episode:
    """Return the episode of an id, or of the only id with that beginning; with its routed experts if asked for.

    Raises:
        StoreError: if no id or more than one fits.
        DamagedEpisodeError: if its line can't be read.
    """
    with open_index(path) as index:
        found = index.find(episode_id)
        if len(found) == 1:
            return episode_at(path, found[0][0], experts=experts)
        if found:
            raise StoreError(
                f"{len(found)} episodes of {path} begin with {episode_id!r}: {_some([id for _, id in found])}"
            )
        _refuse_damage(index)
        known = list(islice(index.ids(), _HINTED))
        hint = did_you_mean(episode_id, known) or f" It has {_some(known)}." if known else " It has no episodes."
        raise StoreError(f"{path} has no episode {episode_id!r}.{hint}")


def episodes_of(path: str | os.PathLike[str], ids: Iterable[str]) -> dict[str, Episode]:
    """Return the episodes of some ids, by these; of those that there are."""
    with open_index(path) as index:
        places = {id: place for id in ids for place, known in index.find(id) if known == id}
    return {id: episode_at(path, place) for id, place in places.items()}


def episode_ids(path: str | os.PathLike[str]) -> set[str]:
    """Return the ids of the episodes that a file or a run's folder holds.

    A file that is not there yet holds none, so that a run can ask what it still has to do.
    """
    if not shards_of(path):
        return set()
    with open_index(path) as index:
        _refuse_damage(index)
        return set(index.ids())


def samples_of(path: str | os.PathLike[str], group: str) -> set[int]:
    """Return the numbers of a group's samples that a file or a run's folder holds; none if it is not there yet."""
    if not shards_of(path):
        return set()
    with open_index(path) as index:
        _refuse_damage(index)
        return {head.sample for head in index.heads() if head.group == group}


def _refuse_damage(index: Index) -> None:
    if place := index.damaged():
        parse_line(index.path, place, line_at(index.path, place))


def _warn_of_repeated(index: Index) -> None:
    if repeated := index.repeated():
        lines = ", ".join(describe(index.path, place) for place in repeated[:5]) + (
            ", ..." if len(repeated) > 5 else ""
        )
        warnings.warn(
            f"{index.path}: {plural(len(repeated), 'line')} left out for an id that is further up: {lines}",
            stacklevel=3,
        )


def _lines(path: str | os.PathLike[str], places: Iterator[Place]) -> Iterator[tuple[Place, bytes]]:
    """Yield the lines at places that are in the files' order; those that are near each other are read in one go."""
    for name, wanted in groupby(places, attrgetter("shard")):
        shard, at = shard_at(path, Place(name, 0)), -1
        rest: Iterator[tuple[Place, bytes]] = iter(())
        for place in wanted:
            if at < 0 or place.offset - at > _NEAR:
                rest = read_from(shard, place.offset)
            for found, line in rest:
                if found.offset >= place.offset:
                    at = place.offset
                    yield place, line
                    break


def _says(line: bytes, text: str) -> bool:
    """Return whether an episode's line has a text in what people read; the bytes decide for most."""
    if text.isascii() and json.dumps(text)[1:-1].lower().encode() not in line.lower():
        return False
    row = json.loads(line)
    said = _texts([row.get(name) for name in ("id", "task", "messages", "error")])
    return any(text.casefold() in part.casefold() for part in said)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
    else:
        yield str(value)


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
