"""Sets of spans."""

from spans import Spans


def test_add_joins() -> None:
    assert list(Spans([(5, 7), (0, 2), (2, 5), (9, 10)])) == [(0, 7), (9, 10)]


def test_remove_of_an_end() -> None:
    spans = Spans([(0, 10)])
    spans.remove(7, 12)
    assert list(spans) == [(0, 7)] and 6 in spans and 7 not in spans


def test_remove_of_nothing() -> None:
    spans = Spans([(0, 10)])
    spans.remove(10, 20)
    assert list(spans) == [(0, 10)]


def test_remove_splits() -> None:
    spans = Spans([(0, 10), (20, 30)])
    spans.remove(3, 5)
    assert list(spans) == [(0, 3), (5, 10), (20, 30)]
    spans.remove(6, 6)
    assert list(spans) == [(0, 3), (5, 10), (20, 30)]


def test_remove_over_several() -> None:
    spans = Spans([(0, 10), (20, 30), (40, 50)])
    spans.remove(5, 45)
    assert list(spans) == [(0, 5), (45, 50)]
    spans.remove(0, 50)
    assert list(spans) == []


def test_free_after_remove() -> None:
    assert list(Spans([(10, 20), (30, 40)]).free(0, 60)) == [(0, 10), (20, 30), (40, 60)]
