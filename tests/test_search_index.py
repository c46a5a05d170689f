"""agent_rl.tools.search: the index that agents search."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.tools.search import SearchIndex

FACTS = ["bafo was born in kila", "bafo lives in mado", "kila is the capital of nogi", 'Ünal\'s café, quoted "it"']


def test_search_requires_every_word():
    index = SearchIndex(FACTS)
    assert sorted(index.search("bafo", k=5)) == sorted(FACTS[:2])
    assert index.search("bafo born", k=5) == FACTS[:1]
    assert index.search("born bafo", k=5) == FACTS[:1]
    assert index.search("bafo nogi", k=5) == []
    assert index.search("baf", k=5) == []


def test_search_returns_at_most_k_documents():
    index = SearchIndex([f"same words {i}" for i in range(10)])
    assert index.search("same", k=3) == ["same words 0", "same words 1", "same words 2"]


def test_search_ranks_the_best_match_first():
    index = SearchIndex(["city of many words that say little about it", "city city", "nothing"])
    assert index.search("city", k=2) == ["city city", "city of many words that say little about it"]


def test_search_ignores_case_and_accents():
    assert SearchIndex(FACTS).search("UNAL CAFE", k=1) == FACTS[3:]


@pytest.mark.parametrize(
    "query", ["", "  ", "?!", '"', "bafo OR kila", "NOT bafo", "text:bafo", "NEAR(bafo kila)", "ba*", "'; drop"]
)
def test_search_takes_fts_syntax_as_words(query):
    assert SearchIndex(FACTS).search(query, k=5) == []


@given(st.text(max_size=30))
def test_search_accepts_any_query(query):
    assert len(SearchIndex(FACTS).search(query, k=2)) <= 2


def test_search_works_from_any_thread():
    index, found = SearchIndex(FACTS), []
    thread = threading.Thread(target=lambda: found.append(index.search("capital", k=1)))
    thread.start()
    thread.join()
    assert found == [FACTS[2:3]]
