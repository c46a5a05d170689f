"""The file of an index: its tables, and how they grow with the shards."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from agent_rl.core.escaping import escape
from agent_rl.core.messages import JSON
from agent_rl.errors import StoreError
from agent_rl.store.codec import SCHEMA
from agent_rl.store.heads import head_of
from agent_rl.store.shards import Shard, digest_of, read_from, state_of
from agent_rl.store.where import FIELDS, INNER

BATCH: Final = 5_000
"""The lines of one transaction."""
WAIT: Final = 60.0
"""Seconds to wait for another process's transaction."""
JSON_COLUMNS: Final = (*INNER, "tool_errors")
_COLUMNS = (*FIELDS, *JSON_COLUMNS)
_TABLES = (
    "CREATE TABLE shards (key INTEGER PRIMARY KEY, name TEXT UNIQUE, state TEXT, stop INTEGER, last INTEGER, "
    "first_line BLOB, last_line BLOB, episodes INTEGER)",
    "CREATE TABLE episodes (place INTEGER PRIMARY KEY, {})".format(", ".join(f'"{name}"' for name in _COLUMNS)),
    "CREATE INDEX by_id ON episodes (id)",
    "CREATE TABLE repeated (id TEXT PRIMARY KEY)",
    "CREATE TABLE damaged (place INTEGER PRIMARY KEY)",
)
_VERSION = zlib.crc32(repr((_TABLES, SCHEMA, 3)).encode()) >> 1
_INSERT = f"INSERT INTO episodes VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"
_OFFSET_BITS = 44  # a place as one number: the shard's key, and an offset of up to 16 TiB
_fields, _mappings = attrgetter(*FIELDS), attrgetter(*JSON_COLUMNS)


class _Known(NamedTuple):
    """What the index has of a shard."""

    key: int
    state: str = ""
    """The size and age of the shard's file when it was read to the end."""
    stop: int = 0
    """Where the last line that was read ends."""
    last: int = 0
    """Where it begins."""
    first_line: bytes = b""
    """A digest, as of the last line: they say whether the shard is still the same."""
    last_line: bytes = b""
    episodes: int = 0


def open_database(file: Path | None) -> sqlite3.Connection:
    """Open an index, or one in memory, and make its tables where it has none of this version.

    Raises:
        sqlite3.DatabaseError: if it is damaged, or can't be written.
    """
    database = sqlite3.connect(file or ":memory:", isolation_level=None, timeout=WAIT, check_same_thread=False)
    try:
        # readers don't wait for writers; a power cut may cost the last transactions, which are made again
        for setting in ("journal_mode = WAL", "synchronous = NORMAL", "temp_store = MEMORY", "mmap_size = 4294967296"):
            database.execute(f"PRAGMA {setting}")
        if not _is_current(database):
            with _Transaction(database):
                if not _is_current(database):
                    _make_tables(database)
    except BaseException:
        database.close()
        raise
    return database


def remove(file: Path) -> None:
    """Delete an index."""
    for name in (file.name, f"{file.name}-wal", f"{file.name}-shm"):
        with suppress(OSError):
            file.with_name(name).unlink()


def grow(database: sqlite3.Connection, shard: Shard) -> None:
    """Add what a shard has and the index lacks; a shard that is another is read again."""
    while _grow(database, shard):
        pass


def number_of(key: int, offset: int) -> int:
    """Return a place as one number."""
    return key << _OFFSET_BITS | offset


def offset_of(number: int) -> int:
    """Return the offset of a place from `number_of`."""
    return number & ((1 << _OFFSET_BITS) - 1)


def known_shard(database: sqlite3.Connection, name: str) -> _Known | None:
    """Return what the index has of a shard."""
    sql = f"SELECT {', '.join(_Known._fields)} FROM shards WHERE name = ?"
    row = database.execute(sql, (name,)).fetchone()
    return None if row is None else _Known(*row)


class _Transaction:
    """What is written within is there whole or not at all."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *raised: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")


def _is_current(database: sqlite3.Connection) -> bool:
    return bool(database.execute("PRAGMA user_version").fetchone()[0] == _VERSION)


def _make_tables(database: sqlite3.Connection) -> None:
    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        database.execute(f'DROP TABLE "{name}"')
    for table in _TABLES:
        database.execute(table)
    database.execute(f"PRAGMA user_version = {_VERSION}")


def _grow(database: sqlite3.Connection, shard: Shard) -> bool:
    """Add some lines, if there are any; return whether there may be more."""
    state, known = state_of(shard), known_shard(database, shard.name)
    if known is not None and known.state == state:
        return False
    with _Transaction(database):
        known = known_shard(database, shard.name)  # another process may have been quicker
        if known is not None and not _is_same(shard, known):
            _forget(database, known.key)
            known = None
        if known is None:
            made = database.execute("INSERT INTO shards (name) VALUES (?)", (shard.name,))
            known = _Known(int(made.lastrowid or 0))
        lines = 0
        for place, line in islice(read_from(shard, known.stop), BATCH):
            is_readable = _add(database, number_of(known.key, place.offset), line)
            known = known._replace(
                stop=place.offset + len(line),
                last=place.offset,
                first_line=known.first_line or digest_of(line),
                last_line=digest_of(line),
                episodes=known.episodes + is_readable,
            )
            lines += 1
        known = known._replace(state=state if lines < BATCH else "")
        setters = ", ".join(f"{name} = ?" for name in _Known._fields)
        database.execute(f"UPDATE shards SET {setters} WHERE key = ?", (*known, known.key))
    return lines == BATCH


def _is_same(shard: Shard, known: _Known) -> bool:
    if not known.stop:
        return True
    lines = (next((line for _, line in read_from(shard, at)), b"") for at in (0, known.last))
    return [*map(digest_of, lines)] == [known.first_line, known.last_line]


def _forget(database: sqlite3.Connection, key: int) -> None:
    of_shard = (number_of(key, 0), number_of(key + 1, 0) - 1)
    for table in ("episodes", "damaged"):
        database.execute(f"DELETE FROM {table} WHERE place BETWEEN ? AND ?", of_shard)
    database.execute("DELETE FROM shards WHERE key = ?", (key,))


def _add(database: sqlite3.Connection, place: int, line: bytes) -> bool:
    """Add a line; return whether it could be read."""
    try:
        head = head_of(line)
    except StoreError:
        database.execute("INSERT INTO damaged VALUES (?)", (place,))
        return False
    row = (place, *map(_stored, _fields(head)), *map(_stored_mapping, _mappings(head)))
    database.execute("INSERT OR IGNORE INTO repeated SELECT id FROM episodes WHERE id = ?", (row[_ID],))
    database.execute(_INSERT, row)
    return True


_ID = 1 + FIELDS.index("id")


def _stored(value: object) -> object:
    if isinstance(value, str):
        return escape(value)  # SQLite has no halves of surrogate pairs, either
    return float(value) if isinstance(value, int) and value.bit_length() > 63 else value


def _stored_mapping(value: Mapping[str, JSON]) -> str:
    return escape(json.dumps(dict(value), ensure_ascii=False)) if value else "{}"
