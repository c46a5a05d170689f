"""The index: a table of heads in SQLite beside the episodes, brought up to date whenever it is opened.

It is a cache: deleted, damaged or of another version, it is made from the episodes again. What was appended to them is
added by the next that opens it, also while a run is writing: processes share the work, a batch of lines in each
transaction. Of each shard the index knows its first line and the last that it has read, which say whether the shard is
still the same. Small runs, and folders that can't be written, are indexed in memory.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from agent_rl.core.escaping import ESCAPE, escape, unescape
from agent_rl.errors import StoreError
from agent_rl.store.heads import Head
from agent_rl.store.index_file import JSON_COLUMNS, grow, known_shard, number_of, offset_of, open_database, remove
from agent_rl.store.shards import Place, Shard, existing_shards
from agent_rl.store.where import FIELDS, FLAGS, SQL, Every, Node, sql_of

INDEX: Final = "episodes.sqlite"
"""Of a run; the file of other episodes is called as theirs."""
SMALL: Final = 4_000_000
"""The bytes of episodes up to which no index is kept: they are read in a tenth of a second."""
_EVERYTHING = Every(())
_NAMES = (*FIELDS, *JSON_COLUMNS)
_COLUMNS = ", ".join(f'"{name}"' for name in _NAMES)
_PLACED = "shard, place, id"
_TEMPORARY = (
    "CREATE TEMP TABLE shown (rank INTEGER PRIMARY KEY, key INTEGER, shard TEXT, low INTEGER, high INTEGER)",
    "CREATE TEMP TABLE left_out (place INTEGER PRIMARY KEY)",
    "CREATE TEMP TABLE among (place INTEGER PRIMARY KEY)",
)
_EPISODES = "shown CROSS JOIN episodes ON place >= low AND place < high"
"""Of the path, in their order: SQLite walks through the left table in its own."""
_OF_RUN = re.compile(r"episodes(\..+)?\.jsonl", re.DOTALL)


def open_index(path: str | os.PathLike[str]) -> Index:
    """Open the index of an episode file or a run's folder, and bring it up to date.

    Raises:
        StoreError: if there is no such file.
    """
    shards = existing_shards(path)
    size = 0
    for shard in shards:
        with suppress(FileNotFoundError):  # it is being closed
            size += shard.path.stat().st_size
    if size <= SMALL:
        return _opened(path, None)
    kept = _file_of(shards[0].file)
    for _ in range(2):
        try:
            return _opened(path, kept)
        except sqlite3.OperationalError:  # it can't be written, or others were at it for a minute
            break
        except sqlite3.DatabaseError:  # it is damaged
            remove(kept)
    return _opened(path, None)


def _opened(path: str | os.PathLike[str], file: Path | None) -> Index:
    index = Index(path, open_database(file))
    try:
        index.update()
    except BaseException:
        index.close()
        raise
    return index


def _file_of(episodes: Path) -> Path:
    """Return where the index of a writer's shards is: one file for all of a run."""
    return episodes.with_name(INDEX) if _OF_RUN.fullmatch(episodes.name) else episodes.with_suffix(".sqlite")


class GroupHead(NamedTuple):
    """What a list of groups shows of one."""

    env: str
    group: str
    question: str
    episodes: int
    reward: float | None
    """The mean; None if no episode has one."""
    best: float | None
    solved: int
    step: int | None


class Index:
    """The heads of a path's episodes; for one thread at a time. Close it, or use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str], database: sqlite3.Connection) -> None:
        """Take a database; `open_index` makes one."""
        self.path = path
        self.total = 0
        """How many episodes there are."""
        self._database = database
        for table in _TEMPORARY:
            database.execute(table)

    def close(self) -> None:
        """Close the database; more than once is fine."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def update(self) -> None:
        """Add what was appended since.

        Raises:
            StoreError: if the episodes are gone.
        """
        shards = existing_shards(self.path)
        for shard in shards:
            grow(self._database, shard)
        self._show(shards)

    def count(self, where: Node = _EVERYTHING) -> int:
        """Return how many episodes fit."""
        return self.total if where == _EVERYTHING else self._rows("count(*)", sql_of(where))[0][0]

    def places(
        self,
        where: Node = _EVERYTHING,
        order: SQL | None = None,
        *,
        reverse: bool = False,
        limit: int = -1,
        offset: int = 0,
        among: Iterable[Place] | None = None,
    ) -> list[tuple[Place, str]]:
        """Return the places and ids of the episodes that fit, in the files' order.

        Args:
            where: what fits.
            order: of `sort_key`: the smallest first, those of equal value in the files' order, those without one last.
            reverse: whether the largest come first, or the newest.
            limit: the most to return.
            offset: how many to leave out before.
            among: the places of those to choose from; None for all.
        """
        key, given = order or ("0", ())
        down = "DESC" if reverse else ""
        by = f"{key} IS NULL, {key} {down}, rank, place" if order else f"rank {down}, place {down}"
        limits = (min(limit, 2**63 - 1), min(offset, 2**63 - 1))
        sql, values = sql_of(where)
        if among is not None:
            self._database.execute("DELETE FROM among")
            numbers = ((number,) for number in self._numbers(among))
            self._database.executemany("INSERT INTO among VALUES (?)", numbers)
            sql += " AND place IN (SELECT place FROM among)"
        sql += f" ORDER BY {by} LIMIT ? OFFSET ?"
        return _placed(self._rows(_PLACED, (sql, (*values, *(given * 2 if order else ()), *limits))))

    def heads(self, places: Iterable[Place] | None = None) -> Iterator[Head]:
        """Yield the heads at places, or of all episodes in the files' order."""
        if places is None:
            return map(_head, self._query(_COLUMNS, ("1 ORDER BY rank, place", ())))
        one = f"SELECT {_COLUMNS} FROM episodes WHERE place = ?"
        return (_head(self._database.execute(one, (number,)).fetchone()) for number in self._numbers(places))

    def groups(self, where: Node = _EVERYTHING, *, limit: int = -1, offset: int = 0) -> list[GroupHead]:
        """Return the groups of the episodes that fit, in the files' order."""
        columns = 'env, "group", min(question), count(*), avg(reward), max(reward), sum(success IS 1), min(step)'
        sql, values = sql_of(where)
        sql += ' GROUP BY env, "group" ORDER BY min(rank), min(place) LIMIT ? OFFSET ?'
        rows = self._rows(columns, (sql, (*values, limit, offset)))
        return [GroupHead(_text(env), _text(group), _text(said), *rest) for env, group, said, *rest in rows]

    def find(self, beginning: str) -> list[tuple[Place, str]]:
        """Return the places and ids of episodes whose ids have a beginning: only one if that is an id itself."""
        upwards = (beginning, beginning + chr(0x10FFFF))
        found = self._rows(_PLACED, ("id = ?", (beginning,))) or self._rows(_PLACED, ("id BETWEEN ? AND ?", upwards))
        return _placed(found)

    def ids(self) -> Iterator[str]:
        """Yield the ids, in the files' order."""
        return (_text(id) for (id,) in self._query("id", ("1 ORDER BY rank, place", ())))

    def repeated(self) -> list[Place]:
        """Return the places of lines that repeat an id further up; everything else leaves them out."""
        rows = self._database.execute(
            "SELECT shard, place FROM left_out JOIN shown ON place >= low AND place < high ORDER BY place"
        )
        return [Place(name, offset_of(place)) for name, place in rows]

    def damaged(self) -> Place | None:
        """Return the place of the first line that can't be read, if there is one."""
        rows = self._database.execute(
            "SELECT shard, place FROM shown CROSS JOIN damaged ON place >= low AND place < high ORDER BY rank, place"
        )
        return next((Place(name, offset_of(place)) for name, place in rows), None)

    def _show(self, shards: Sequence[Shard]) -> None:
        """Remember which shards are meant, in which order, and leave out what repeats an id."""
        run = self._database.execute
        run("DELETE FROM shown")
        run("DELETE FROM left_out")
        known = [(shard.name, found) for shard in shards if (found := known_shard(self._database, shard.name))]
        for rank, (name, found) in enumerate(known):
            first, stop = number_of(found.key, 0), number_of(found.key, found.stop)
            run("INSERT INTO shown VALUES (?, ?, ?, ?, ?)", (rank, found.key, name, first, stop))
        self.total = sum(found.episodes for _, found in known)
        if run("SELECT 1 FROM repeated LIMIT 1").fetchone():
            order = "row_number() OVER (PARTITION BY id ORDER BY rank, place) AS number"
            rows = f"SELECT place, {order} FROM {_EPISODES} WHERE id IN (SELECT id FROM repeated)"
            self.total -= run(f"INSERT INTO left_out SELECT place FROM ({rows}) WHERE number > 1").rowcount

    def _numbers(self, places: Iterable[Place]) -> Iterator[int]:
        keys = dict(self._database.execute("SELECT shard, key FROM shown"))
        return (number_of(keys[place.shard], place.offset) for place in places)

    def _rows(self, columns: str, where: SQL) -> list[Any]:
        try:
            return self._query(columns, where).fetchall()
        except sqlite3.DatabaseError as error:
            kept = self._database.execute("SELECT file FROM pragma_database_list").fetchone()[0]
            raise StoreError(
                f"{kept or 'the index'} can't be read: {error}; delete it, and it is made again"
            ) from error

    def _query(self, columns: str, where: SQL) -> sqlite3.Cursor:
        sql, given = where
        sql = f"SELECT {columns} FROM {_EPISODES} WHERE place NOT IN (SELECT place FROM left_out) AND {sql}"
        return self._database.execute(sql, [escape(value) if isinstance(value, str) else value for value in given])


def _placed(rows: Iterable[tuple[str, int, str]]) -> list[tuple[Place, str]]:
    return [(Place(shard, offset_of(place)), _text(id)) for shard, place, id in rows]


def _head(row: tuple[object, ...]) -> Head:
    read = (_text(value) if isinstance(value, str) else value for value in row)
    values: dict[str, Any] = dict(zip(_NAMES, read, strict=True))
    values |= {name: json.loads(str(values[name])) for name in JSON_COLUMNS}
    values |= {name: None if values[name] is None else bool(values[name]) for name in FLAGS}
    return Head(**values)


def _text(text: str) -> str:
    return unescape(text) if ESCAPE in text else text
