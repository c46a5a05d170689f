"""Answers of servers, kept in a SQLite file that several processes may use at a time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from agent_rl.errors import ConfigError

WAIT = 30.0
"""Seconds to wait while another process writes."""


class AnswerCache:
    """Answers by key; none is ever dropped: delete the file to begin again."""

    def __init__(self, path: str | Path) -> None:
        """Open the file, and make it if there is none.

        Raises:
            ConfigError: if it is no SQLite file, or can't be written.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(self._connect()) as database, database:
                database.execute("create table if not exists answers (key text primary key, answer text) without rowid")
        except sqlite3.Error as error:
            raise ConfigError(f"cache={str(path)!r} can't be used: {error}; name another file") from error

    def get(self, key: str) -> str | None:
        """Return an answer, or None if there is none."""
        with closing(self._connect()) as database:
            found = database.execute("select answer from answers where key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def put(self, key: str, answer: str) -> None:
        """Keep an answer."""
        with closing(self._connect()) as database, database:
            database.execute("insert or replace into answers values (?, ?)", (key, answer))

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=WAIT)
