"""agent_rl.tools.search: the index that agents search."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.messages import ToolCall
from agent_rl.errors import ConfigError
from agent_rl.gym.tool_calls import call_tools
from agent_rl.tools import dense
from agent_rl.tools import search as search_module
from agent_rl.tools.search import Passage, SearchIndex, described, open_index, open_search, search_tool

FACTS = ["bafo was born in kila", "bafo lives in mado", "kila is the capital of nogi", 'Ünal\'s café, quoted "it"']


def found(index: SearchIndex, query: str, k: int, every_word: bool = True) -> list[str]:
    return [passage.text for passage in index.search(query, k, every_word=every_word)]


def test_search_requires_every_word_if_asked():
    index = SearchIndex(FACTS)
    assert sorted(found(index, "bafo", 5)) == sorted(FACTS[:2])
    assert found(index, "bafo born", 5) == FACTS[:1]
    assert found(index, "born bafo", 5) == FACTS[:1]
    assert found(index, "bafo nogi", 5) == []
    assert found(index, "baf", 5) == []


def test_search_takes_any_word_otherwise():
    index = SearchIndex(FACTS)
    assert found(index, "In which city was bafo born, please?", 1, every_word=False) == FACTS[:1]
    assert sorted(found(index, "bafo nogi", 5, every_word=False)) == sorted(FACTS[:3])
    assert found(index, "bafos", 5, every_word=False) == []


def test_search_returns_at_most_k_documents():
    index = SearchIndex([f"same words {i}" for i in range(10)])
    assert found(index, "same", 3) == ["same words 0", "same words 1", "same words 2"]


def test_search_ranks_the_best_match_first():
    index = SearchIndex(["city of many words that say little about it", "city city", "nothing"])
    assert found(index, "city", 2) == ["city city", "city of many words that say little about it"]


def test_search_counts_titles_more_than_texts():
    index = SearchIndex([Passage("oslo oslo oslo", "a trip"), Passage("a town of the north", "oslo"), *FACTS])
    assert index.search("oslo", 1)[0].title == "oslo"


def test_search_ignores_case_and_accents():
    assert found(SearchIndex(FACTS), "UNAL CAFE", 1) == FACTS[3:]


@pytest.mark.parametrize(
    "query", ["", "  ", "?!", '"', "bafo OR kila", "NOT bafo", "text:bafo", "NEAR(bafo kila)", "ba*", "'; drop"]
)
def test_search_takes_fts_syntax_as_words(query):
    assert found(SearchIndex(FACTS), query, 5) == []


@given(st.text(max_size=30), st.booleans())
def test_search_accepts_any_query(query, every_word):
    assert len(SearchIndex(FACTS).search(query, 2, every_word=every_word)) <= 2


def test_search_works_from_any_thread():
    index, results = SearchIndex(FACTS), []
    thread = threading.Thread(target=lambda: results.append(found(index, "capital", 1)))
    thread.start()
    thread.join()
    assert results == [FACTS[2:3]]


# An index in a file


def corpus(folder: Path, rows: list[dict[str, str]]) -> Path:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


NAMES = [a + b + c for a in ("bar", "den", "fol", "gri", "hun") for b in "aeiou" for c in ("mak", "nes", "rol", "tis")]


def encyclopedia() -> list[dict[str, str]]:
    """Passages about made-up people; each also names another, and all share the words of the questions."""
    rng = np.random.default_rng(0)
    filler = re.findall(
        r"\w+", "the place of which a person was the first to be in and what it is that year or when they were"
    )
    names = [f"{a} {b}" for a in NAMES[:60] for b in NAMES[60:]]
    texts = [
        f"{name} was a painter, born in {rng.integers(1000, 2000)}. {' '.join(rng.choice(filler, 30))} "
        f"{names[rng.integers(len(names))]} {' '.join(rng.choice(filler, 10))}"
        for name in names
    ]
    return [{"id": str(i), "title": n, "text": t} for i, (n, t) in enumerate(zip(names, texts, strict=True))]


def test_search_recalls_answers_of_full_questions(tmp_path, monkeypatch):
    rows = encyclopedia()
    index = open_index(corpus(tmp_path, rows))
    asked = [rows[i] for i in np.random.default_rng(1).choice(len(rows), 60, replace=False)]

    def recall(every_word: bool) -> float:
        question = "What is the year in which the person who is known as {}, a famous painter, was born?"
        hits = [index.search(question.format(row["title"]), 5, every_word=every_word) for row in asked]
        return sum(row["id"] in {p.id for p in hit} for row, hit in zip(asked, hits, strict=True)) / len(asked)

    assert recall(every_word=True) == 0.0
    assert recall(every_word=False) >= 0.9
    monkeypatch.setattr(search_module, "MATCHES", 200)  # the words that all passages have are left out
    assert recall(every_word=False) >= 0.9


def test_search_leaves_common_words_out(tmp_path):
    index = open_index(corpus(tmp_path, [{"text": f"Same wórd number {i}"} for i in range(1200)]))
    assert index._common == {"same": 1200, "word": 1200, "number": 1200}
    queries: list[str] = []
    index._connect().set_trace_callback(queries.append)
    assert len(index.search("same WÓRD number 7", 1)) == 1
    assert index._rarest(["same"] * 30)[0] == "same"
    assert index._rarest(["7", *["wÓrd"] * 30]) == ["7", *["wÓrd"] * (search_module.MATCHES // 1200)]


def test_open_index_builds_once_and_after_changes(tmp_path, monkeypatch):
    built: list[Path] = []
    build = search_module._build
    monkeypatch.setattr(search_module, "_build", lambda path, *rest: (built.append(path), build(path, *rest)))
    file = corpus(tmp_path, [{"text": "an apple", "id": "1"}, {"contents": "a pear"}])
    first = open_index(file)
    assert open_index(file).search("apple", 1) == [Passage("an apple", "", "1")]
    assert len(built) == 1
    corpus(tmp_path, [{"text": "a peach"}])
    assert open_index(file).search("apple peach", 2) == [Passage("a peach")]
    assert first.search("pear", 1) == [Passage("a pear")]  # read on until it is opened again
    assert len(built) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "corpus.jsonl.index.sqlite"}


def test_open_index_replaces_damaged_files(tmp_path):
    file = corpus(tmp_path, [{"text": "an apple"}])
    index = tmp_path / "kept" / "here.sqlite"
    index.parent.mkdir()
    index.write_bytes(os.urandom(5000))
    assert open_index(file, index).search("apple", 1)


def test_open_index_reads_folders(tmp_path):
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("# Apples\n\n" + "\n\n".join(f"about {word} " * 30 for word in ("kings", "queens")))
    (folder / "deep" / "b.txt").write_text("pears")
    (folder / "c.bin").write_text("pears")
    index = open_index(folder)
    assert [p.id for p in index.search("pears", 5)] == ["deep/b.txt#1"]
    assert [p.id for p in index.search("queens", 5)] == ["a.md#1"]
    (folder / "a.md").write_text("\n\n".join(f"about {word} " * 90 for word in ("kings", "queens")))
    assert [p.id for p in open_index(folder).search("queens", 5)] == ["a.md#2"]


def test_open_index_serves_threads_at_once(tmp_path):
    file = corpus(tmp_path, [{"text": f"word {i}"} for i in range(200)])
    with ThreadPoolExecutor(4) as pool:  # each builds, or finds what another has built
        indexes = list(pool.map(lambda _: open_index(file), range(4)))
        hits = list(pool.map(lambda i: indexes[i % 4].search(str(i), 1)[0].text, range(200)))
    assert hits == [f"word {i}" for i in range(200)]


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda folder: folder / "missing.jsonl", r"there is no corpus .*missing\.jsonl: a relative path begins"),
        (lambda folder: folder, "is no corpus: give a .jsonl file, or a folder"),
        (lambda folder: corpus(folder, [{"text": "a"}, {"txt": "b"}]), r"corpus.jsonl:2 is no passage"),
    ],
)
def test_open_index_refuses_what_is_no_corpus(tmp_path: Path, make: Callable[[Path], Path], hint: str):
    with pytest.raises(ConfigError, match=hint):
        open_index(make(tmp_path))
    assert not list(tmp_path.glob("*sqlite*"))


def test_open_index_reads_marked_text_and_refuses_other_encodings(tmp_path: Path):
    marked, latin = tmp_path / "marked.jsonl", tmp_path / "latin.jsonl"
    marked.write_bytes('{"text": "café"}\n'.encode("utf-8-sig"))
    latin.write_bytes('{"text": "café"}\n'.encode("latin-1"))
    assert open_index(marked).search("cafe", 1)[0].text == "café"
    with pytest.raises(ConfigError, match=r"latin.jsonl:1 is no passage"):
        open_index(latin)


def test_search_tool_answers_with_passages(tmp_path):
    search = search_tool(corpus(tmp_path, [{"title": "Oslo", "text": "A town of Norway."}, {"text": "Bergen"}]), k=1)
    calls = [ToolCall("c", "search", {"query": query}) for query in ("Where is Oslo?", "nothing")]
    answers = asyncio.run(call_tools({"search": search}, calls, None))
    assert [answer.content for answer in answers] == ["[1] Oslo: A town of Norway.", "no results"]


def test_described_passages_are_cut():
    text = described([Passage("Rome is old", "Rome"), Passage("x" * 5000, "X")])
    assert text.startswith("[1] Rome is old\n[2] X: xx") and text.endswith("x…") and len(text) < 1100


def test_dense_and_hybrid_search_rank_by_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/adapters/test_dense.py has real vectors."""
    words = ("cat", "tiger", "boat")
    meaning = {"cat": (1.0, 0.0), "tiger": (0.8, 0.6), "boat": (0.0, 1.0), "feline": (1.0, 0.0)}
    embedded = []

    def embed(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        embedded.extend(texts)
        return np.array([meaning.get(text, (0.0, 0.0)) for text in texts], np.float32)

    monkeypatch.setattr(dense, "embed", embed)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    for method, query, found in (
        ("dense", "feline", ["cat", "tiger"]),
        ("hybrid", "boat", ["boat", "tiger"]),
        ("bm25", "feline", []),
    ):
        assert [p.text for p in open_search(corpus, method)(query, 2)] == found
    assert [text for text in embedded if text in words] == [*words, "boat"], "the corpus is embedded once"
    with pytest.raises(ConfigError, match="there are bm25, dense and hybrid"):
        open_search(corpus, "sparse")
    monkeypatch.undo()
    monkeypatch.setattr(dense, "find_spec", lambda name: None)
    dense._model.cache_clear()
    with pytest.raises(ConfigError, match=r"needs wordllama, tokenizers, safetensors: pip install 'agent-rl\[dense\]'"):
        dense.embed(["a"])
