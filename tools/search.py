"""Full-text search over a small corpus, in memory: SQLite's FTS5 index with BM25 ranking."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


class SearchIndex:
    """An FTS5 index of documents; build it once per corpus and share it, it is only read."""

    def __init__(self, documents: Sequence[str]) -> None:
        # check_same_thread: a tool may run in a thread of its own; the index is not written after this
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute("create virtual table documents using fts5(text)")
        self._db.executemany("insert into documents values (?)", ((text,) for text in documents))

    def search(self, query: str, k: int) -> list[str]:
        """Return at most `k` documents that have every word of the query, best first (BM25)."""
        words = _WORD.findall(query)
        if not words:
            return []
        quoted = " ".join(f'"{word}"' for word in words)  # quoted, a word can't be read as FTS5 syntax
        rows = self._db.execute(
            "select text from documents where documents match ? order by rank, rowid limit ?", (quoted, k)
        )
        return [text for (text,) in rows]
