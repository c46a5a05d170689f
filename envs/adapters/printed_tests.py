"""The results that pytest and unittest print: whether tests of some names pass, by SWE-bench's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MAX_LINE = 32 * 1024
"""Characters of a line that are looked at."""
PASSED = ("PASSED", "XFAIL", "ok", "expected failure")
_PYTEST = re.compile("(PASSED|XFAIL|FAILED|ERROR) (.+)")
_FAILURE = re.compile(r"(?:FAIL|ERROR): ([^)]+\))")
_ID = re.compile(r"\w+ \([\w.]+\)")
_OF_UNITTEST = (*PASSED, "FAIL", "ERROR", "unexpected success")


def all_pass(output: str, names: Sequence[str]) -> bool:
    """Whether all tests of these names pass, and none of them fails, by the lines of pytest (-rA) or unittest (-v)."""
    wanted, passed = set(names), set[str]()
    for is_passed, tests in results_of(output):
        if is_passed:
            passed |= wanted.intersection(tests)
        elif wanted.intersection(tests):
            return False
    return passed == wanted


def results_of(output: str) -> Iterator[tuple[bool, Sequence[str]]]:
    """Yield of each result that is printed whether it is a pass, and the names that SWE-bench's rows may have for it.

    These end at a space, of pytest's; of unittest's they are an id, or the docstring that stands in the line below it.
    """
    before, open_names = "", list[str]()
    for line in (line.rstrip() for piece in pieces_of(output) for line in piece.split("\n")):
        if (found := _PYTEST.fullmatch(line)) is not None:
            yield found[1] in PASSED, (found[2], found[2].split(" - ")[0], found[2].split()[0])
        elif (found := _FAILURE.match(line)) is not None:
            yield False, (found[1],)
        elif " ... " in f"{line} ":
            name, _, said = f"{line} ".rpartition(" ... ")
            is_result = (said := said.rstrip()) in _OF_UNITTEST or said.startswith("skipped")
            names = [name, name.rpartition(" ... ")[2]] if is_result else [f"{line} ".partition(" ... ")[0]]
            names += [before] if _ID.fullmatch(before) else []
            if is_result:
                yield said in PASSED, names
            open_names = [] if is_result else names
        elif line in PASSED and open_names:  # below what the test itself printed
            yield True, open_names
            open_names = []
        before = line


def pieces_of(text: str) -> Iterator[str]:
    """Yield pieces of whole lines, each cut to `MAX_LINE`: a call that looks at a whole text holds up other threads."""
    start = 0
    while start < len(text):
        end = len(text) if len(text) - start <= MAX_LINE else text.rfind("\n", start, start + MAX_LINE)
        if end >= 0:
            yield text[start:end]
        else:
            yield text[start : start + MAX_LINE]
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
        start = end + 1
