"""SQL over a database that can be read and not changed, with limits on time and size, and the same answer each time."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

STEPS = 1_000_000
"""Instructions of SQLite's virtual machine that one query may take: some 50 ms."""
SECONDS = 5.0
"""How long it may take in any case, as an instruction can be slow."""
MAX_ROWS = 40
"""Rows of a result that the model gets to read: half from the beginning, half from the end."""
MAX_CELL = 200
"""Characters of one value that it gets to read."""

_NAMES = """
abs avg ceil ceiling char coalesce count cume_dist dense_rank first_value floor glob group_concat hex ifnull iif instr
lag last_value lead length like lower ltrim max min mod nth_value ntile nullif percent_rank pow power quote rank replace
round row_number rtrim sign sqrt string_agg substr substring sum total trim trunc typeof unicode upper
"""
FUNCTIONS = frozenset(_NAMES.split())
"""What a query may call: nothing that reads files or the clock, draws at random, or takes seconds (`printf`)."""
_TURNS = [threading.Lock() for _ in range(256)]
"""One for each connection, which some share: a query's limits are its connection's, so it has that to itself."""
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 4000,  # of a value: a sort keeps many
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4000,
    sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def open_read_only(path: str | Path) -> sqlite3.Connection:
    """Open a database file for `query`."""
    database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, check_same_thread=False)
    make_read_only(database)
    return database


def make_read_only(database: sqlite3.Connection) -> None:
    """Take everything but reading from a connection."""
    for limit, value in _LIMITS.items():
        database.setlimit(limit, value)
    database.set_authorizer(_authorize)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    allowed = action in _READS or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def query(database: sqlite3.Connection, sql: str) -> str:
    """Run one query on a read-only connection; return the names of its columns and its rows, a line each.

    Those that several threads ask of one connection are run one after the other.

    Raises:
        sqlite3.Error: if it is no query that SQLite can run, or does more than read.
        TimeoutError: if it takes too long.
    """
    with _TURNS[hash(database) % len(_TURNS)]:
        return _run(database, sql)


def _run(database: sqlite3.Connection, sql: str) -> str:
    until = time.monotonic() + SECONDS
    checks = iter(range(STEPS // 1000))
    # not 0, which continues: the steps end a query at the same place each time, the clock is for slow ones
    database.set_progress_handler(lambda: int(next(checks, None) is None or time.monotonic() > until), 1000)
    head: list[str] = []
    tail: deque[str] = deque(maxlen=MAX_ROWS // 2)
    total = 0
    try:
        cursor = database.execute(sql)
        for total, row in enumerate(cursor, 1):
            (head if total <= MAX_ROWS - MAX_ROWS // 2 else tail).append(_line(row))
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            raise TimeoutError("the query takes too long; make it smaller, or join on ids") from None
        raise
    finally:
        database.set_progress_handler(None, 0)
    if not total:
        return "no rows"
    left_out = total - len(head) - len(tail)
    gap = [f"[... {left_out} rows left out ...]"] if left_out else []
    return "\n".join([_line(column[0] for column in cursor.description), *head, *gap, *tail])


def _line(values: Iterable[object]) -> str:
    return " | ".join("null" if value is None else _cell(str(value)) for value in values)


def _cell(text: str) -> str:
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"
