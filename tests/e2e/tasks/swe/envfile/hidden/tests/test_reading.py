"""Settings that are read."""

import pytest
from envfile import read


def test_read_plain_values() -> None:
    assert read("A=1\nexport B = two words \n\nC=\n") == {"A": "1", "B": "two words", "C": ""}


def test_read_variables() -> None:
    text = "A=1\nB=\"${A}2\"\nC='${A}'\nD=${HOME}/${MISSING}\n"
    assert read(text, {"HOME": "/home"}) == {"A": "1", "B": "12", "C": "${A}", "D": "/home/"}


def test_read_comments() -> None:
    assert read("# all of it\nA=1 # the first\n  # more\n") == {"A": "1"}


def test_read_refuses_other_lines() -> None:
    with pytest.raises(ValueError, match="line 2 is no setting"):
        read("A=1\nB\n")


@pytest.mark.parametrize("quote", ["'", '"'], ids=["single", "double"])
def test_read_hash_in_quotes(quote: str) -> None:
    assert read(f"PASSWORD={quote}a#b{quote}\nOTHER={quote}a #b{quote}") == {"PASSWORD": "a#b", "OTHER": "a #b"}


def test_read_comment_after_quotes() -> None:
    text = 'A=\'it\' # isn\'t it\nB="#1" # "one"\n'
    assert read(text) == {"A": "it", "B": "#1"}


def test_read_hash_without_space() -> None:
    assert read("COLOUR=#fff\nPATH=a#b # c\nNONE= # none\n") == {"COLOUR": "#fff", "PATH": "a#b", "NONE": ""}
