"""Spans as text."""

from spans import Spans, text_of


def test_text_of_hours() -> None:
    assert text_of(Spans([(480, 570), (600, 660)])) == "08:00-09:30, 10:00-11:00"
