"""docs/metrics.md, as data: the names that it documents."""

from __future__ import annotations

import re

from tree import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n## ")[1:]}


def names_in(section: str) -> list[str]:
    """The names in the first column of a section's table."""
    cells = re.findall(r"^\| (`[^|]*) \|", SECTIONS[section], re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a documented name: words in capitals match anything."""
    parts = re.split(r"\b([A-Z]+)\b|(?<=_)([A-Z]+)", name)
    return re.compile("".join(".+" if part.isupper() else re.escape(part) for part in parts if part))


def undocumented(names: set[str], documented: list[str]) -> list[str]:
    known = [pattern(name) for name in (*documented, DIAGNOSIS)]
    return sorted(name for name in names if not any(one.fullmatch(name) for one in known))


DIAGNOSIS = "diagnosis/CAUSE"
"""The head of the page documents it: a run that goes well writes none."""
assert f"`{DIAGNOSIS}`" in PAGE
COMMON = {"kind", "step", "wall_s"}
"""The fields of every row."""
EMBEDDED = [name for title in SECTIONS if not title.startswith(("Rows", "On verl")) for name in names_in(title)]
ON_VERL = [name for title in SECTIONS if title.startswith("On verl") for name in names_in(title)]
