"""Search over a corpus: an FTS5 index of SQLite with BM25 ranking, in memory or in a file built once.

A query is a question or a few words. A passage that has any of them is a match, and rare words count most.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import secrets
import sqlite3
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

from agent_rl.errors import ConfigError
from agent_rl.gym.tool import Tool, tool

MATCHES = 20_000
"""Passages that a query scores, about: its rarest words are taken until they are in so many. This bounds the time of a
query over millions of passages; the words left out are those that say least."""
COMMON = 1000
"""A word in more passages than this is common, and the number is kept."""
MAX_PASSAGE = 1000
"""Characters of a text file's passages, about, and of a passage that a model reads."""

Method: TypeAlias = Literal["bm25", "dense", "hybrid"]

_WORD = re.compile(r"\w+")
_FORMAT = "1"
_SCHEMA = "create virtual table passages using fts5(title, text, id unindexed, tokenize='unicode61')"
_BEST = """
with best as materialized (
    select rowid as place, bm25(passages, 5.0, 1.0) as score from passages where passages match ?
    order by score, place limit ?
)
select id, title, text from best join passages on passages.rowid = place order by score, place
"""  # a title counts five times; the texts are read of the best alone
_PLACES = "select rowid from passages where passages match ? order by bm25(passages, 5.0, 1.0), rowid limit ?"
_ALL = "select id, title, text from passages"


@dataclass(frozen=True, slots=True)
class Passage:
    """What a search finds: a text, perhaps with a title and an id."""

    text: str
    title: str = ""
    id: str = ""


class SearchIndex:
    """An index of passages, shared by all who search: it is only read. `open_index` has one in a file."""

    def __init__(self, passages: Iterable[Passage | str]) -> None:
        """Build an index in memory."""
        # check_same_thread: a tool may run in a thread of its own; the index is not written after this
        database = sqlite3.connect(":memory:", check_same_thread=False)
        _fill(database, passages)
        self._connect: Callable[[], sqlite3.Connection] = lambda: database
        self._common: dict[str, int] = {}

    @classmethod
    def _of_file(cls, path: Path) -> SearchIndex:
        index = cls.__new__(cls)
        own = threading.local()

        def connect() -> sqlite3.Connection:
            """Return the thread's own connection, so that searches run at the same time."""
            if not hasattr(own, "database"):
                own.database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
                own.database.execute("pragma mmap_size = 2147418112")  # SQLite's most
            database: sqlite3.Connection = own.database
            return database

        index._connect = connect
        index._common = dict(connect().execute("select word, passages from common"))
        return index

    def search(self, query: str, k: int, *, every_word: bool = False) -> list[Passage]:
        """Return at most `k` passages, best first.

        Args:
            query: words, or a question.
            k: how many.
            every_word: whether a passage needs all words of the query; it needs one of them otherwise.
        """
        match = self._match(query, every_word=every_word)
        rows = self._connect().execute(_BEST, (match, k)) if match else ()
        return [Passage(text, title, id) for id, title, text in rows]

    def places(self, query: str, k: int) -> list[int]:
        """Return the numbers of the best passages, counted from 0 in the order of the corpus."""
        match = self._match(query)
        return [place - 1 for (place,) in self._connect().execute(_PLACES, (match, k))] if match else []

    def passage(self, place: int) -> Passage:
        """Return a passage by its number."""
        id, title, text = self._connect().execute(f"{_ALL} where rowid = ?", (place + 1,)).fetchone()
        return Passage(text, title, id)

    def passages(self) -> Iterator[Passage]:
        """Yield all passages, in the order of the corpus."""
        yield from (Passage(text, title, id) for id, title, text in self._connect().execute(f"{_ALL} order by rowid"))

    def __len__(self) -> int:
        (n,) = self._connect().execute("select coalesce(max(rowid), 0) from passages").fetchone()  # counting reads all
        return int(n)

    def _match(self, query: str, *, every_word: bool = False) -> str:
        words = list(dict.fromkeys(_WORD.findall(query)))
        if not every_word:
            words = self._rarest(words)
        # quoted, a word can't be read as FTS5 syntax
        return (" " if every_word else " OR ").join(f'"{word}"' for word in words)

    def _rarest(self, words: list[str]) -> list[str]:
        counted = sorted((self._common.get(_folded(word), 0), word) for word in words)
        taken: list[str] = []
        total = 0
        for count, word in counted:
            total += count
            if taken and total > MATCHES:
                break
            taken.append(word)
        return taken


def open_index(source: str | Path, index: str | Path | None = None) -> SearchIndex:
    """Return the index of a corpus, from its file; build this first if there is none or the corpus has changed.

    Args:
        source: a .jsonl file, a passage a line: {"text": ..., "title": ..., "id": ...}, of which the text is needed
            ("contents" is read as well); or a folder of .txt and .md files.
        index: the file to keep it in; beside the source if left out.

    Raises:
        ConfigError: if there is no such corpus, or a line of it is no passage.
    """
    corpus = Path(source)
    files = _files_of(corpus)
    path = Path(index) if index is not None else corpus.with_name(f"{corpus.name}.index.sqlite")
    state = _state(corpus, files)
    if not _is_of(path, state):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # others may be building it now, or reading it
        try:
            _build(new, state, _passages_of(corpus, files))
            os.replace(new, path)  # noqa: PTH105
        finally:
            new.unlink(missing_ok=True)
    return SearchIndex._of_file(path)


def search_tool(
    source: str | Path, *, k: int = 5, index: str | Path | None = None, method: Method = "bm25"
) -> Tool[[str], str]:
    """Return a tool `search` over a corpus, for an environment's `extra_tools`; `open_index` has the arguments.

    Args:
        source: the corpus.
        k: how many passages a call returns.
        index: the file of the index.
        method: by words, by vectors, or by the ranks in both; vectors are kept in a file beside the index.

    Raises:
        ConfigError: if there is no such corpus, or a line of it is no passage, or what embeds is not installed.
    """
    find = open_search(source, method, index)

    @tool
    def search(query: str) -> str:
        """Search a corpus for passages with words of the query; the best are returned.

        Args:
            query: a question, or the words that tell it from others.
        """
        return described(find(query, k))

    return search


def open_search(
    source: str | Path, method: Method = "bm25", index: str | Path | None = None
) -> Callable[[str, int], list[Passage]]:
    """Return a function that finds the best passages for a query, so many at most; arguments as of `search_tool`."""
    opened = open_index(source, index)
    if method == "bm25":
        return opened.search
    if method not in ("dense", "hybrid"):
        raise ConfigError(f"method={method!r}: there are bm25, dense and hybrid")
    from agent_rl.tools import dense

    corpus = Path(source)
    state = _state(corpus, _files_of(corpus))[:12]
    beside = Path(index) if index is not None else corpus
    texts = (f"{p.title}: {p.text}" if p.title else p.text for p in opened.passages())
    vectors = dense.open_vectors(beside.with_name(f"{beside.name}.{state}.npy"), len(opened), texts)

    def find(query: str, k: int) -> list[Passage]:
        places = dense.nearest(vectors, query, k if method == "dense" else max(k, dense.RANKED))
        if method == "hybrid":
            places = dense.fused(places, opened.places(query, dense.RANKED))[:k]
        return [opened.passage(place) for place in places]

    return find


def described(passages: Iterable[Passage], most: int = MAX_PASSAGE) -> str:
    """Return passages as a model reads them: a numbered paragraph each, cut where it exceeds `most` characters."""
    paragraphs = []
    for number, passage in enumerate(passages, 1):
        text = passage.text if len(passage.text) <= most else passage.text[: most - 1] + "…"
        title = f"{passage.title}: " if passage.title and not text.startswith(passage.title) else ""
        paragraphs.append(f"[{number}] {title}{text}")
    return "\n".join(paragraphs) or "no results"


def _fill(database: sqlite3.Connection, passages: Iterable[Passage | str]) -> None:
    database.execute(_SCHEMA)
    whole = (Passage(passage) if isinstance(passage, str) else passage for passage in passages)
    database.executemany("insert into passages values (?, ?, ?)", ((p.title, p.text, p.id) for p in whole))


def _build(path: Path, state: str, passages: Iterable[Passage]) -> None:
    database = sqlite3.connect(path)
    try:
        database.executescript("pragma journal_mode = off; pragma synchronous = off")
        _fill(database, passages)
        database.execute("insert into passages(passages) values ('optimize')")
        database.execute("create virtual table temp.vocabulary using fts5vocab(main, passages, row)")
        database.execute("create table common(word, passages)")
        database.execute("insert into common select term, doc from temp.vocabulary where doc > ?", (COMMON,))
        database.execute("create table corpus as select ? as state", (state,))
        database.commit()
    finally:
        database.close()


def _is_of(path: Path, state: str) -> bool:
    """Return whether a file is the index of the corpus in this state."""
    if not path.is_file():
        return False
    try:
        database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
        try:
            (found,) = database.execute("select state from corpus").fetchone()
        finally:
            database.close()
    except sqlite3.Error:
        return False
    return bool(found == state)


def _files_of(corpus: Path) -> list[Path]:
    if corpus.is_file() and corpus.suffix == ".jsonl":
        return [corpus]
    files = sorted(file for suffix in ("txt", "md") for file in corpus.rglob(f"*.{suffix}")) if corpus.is_dir() else []
    if not corpus.exists():
        raise ConfigError(f"there is no corpus {corpus.absolute()}: a relative path begins in the working directory")
    if not files:
        raise ConfigError(f"{corpus} is no corpus: give a .jsonl file, or a folder of .txt and .md files")
    return files


def _state(corpus: Path, files: Iterable[Path]) -> str:
    """Return a digest of what the files look like: they are not read."""
    looks = [(file.relative_to(corpus.parent).as_posix(), file.stat()) for file in files]
    listing = json.dumps([_FORMAT, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in looks)])
    return hashlib.blake2b(listing.encode(), digest_size=16).hexdigest()


def _passages_of(corpus: Path, files: Iterable[Path]) -> Iterator[Passage]:
    for file in files:
        if file.suffix == ".jsonl":
            with file.open("rb") as lines:  # JSON's own reading knows a byte order mark, and what is no UTF-8
                yield from (_passage(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip())
        else:
            name = file.relative_to(corpus).as_posix()
            pieces = _pieces(file.read_text(encoding="utf-8", errors="replace"))
            yield from (Passage(piece, name, f"{name}#{n}") for n, piece in enumerate(pieces, 1))


def _passage(line: bytes, where: str) -> Passage:
    try:
        row = json.loads(line)
        text = row.get("text", row.get("contents"))
    except (ValueError, AttributeError):
        text = None
    if not isinstance(text, str):
        raise ConfigError(f'{where} is no passage: write {{"text": "...", "title": "...", "id": "..."}}')
    return Passage(text, str(row.get("title") or ""), str(row.get("id", "")))


def _pieces(text: str) -> Iterator[str]:
    """Divide a text at empty lines into pieces of about `MAX_PASSAGE` characters; a longer paragraph is one piece."""
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
    piece = ""
    for paragraph in paragraphs:
        if piece and len(piece) + len(paragraph) > MAX_PASSAGE:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if piece:
        yield piece


@functools.lru_cache(maxsize=65536)
def _folded(word: str) -> str:
    """Return a word as the index has it: in lower case, without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", word.lower()) if not unicodedata.combining(c))
