"""docs/architecture.md: its tree lists the existing rooms, and its links resolve."""

from __future__ import annotations

import re

import pytest
from test_imports import FLOORS
from tree import ROOT, SOURCES

PAGE = (ROOT / "docs" / "architecture.md").read_text()
TREE = re.findall(r"^(\S+) +\S", PAGE.split("```")[1], re.MULTILINE)
INSIDE = ("agent_rl.backends",)
"""Packages whose modules and packages are rooms of their own."""


def rooms() -> set[str]:
    """Every room as the tree writes it: `core/`, `errors.py`, `backends/verl/`."""
    found = set()
    for module, file in SOURCES.items():
        parts = module.split(".")
        depth = 3 if ".".join(parts[:2]) in INSIDE else 2
        if module in INSIDE:
            continue
        path = "/".join(parts[1:depth]) or "__init__"
        package = len(parts) > depth or (len(parts) == depth and file.name == "__init__.py")
        found.add(f"{path}/" if package else f"{path}.py")
    return found


def test_architecture_page_has_every_room_once() -> None:
    assert sorted(TREE) == sorted(rooms())


def test_architecture_page_orders_rooms_by_imports() -> None:
    named = {name: name.removesuffix("/").removesuffix(".py").replace("/", ".") for name in TREE}
    floors = ["__init__" if room == "" else room for room in FLOORS]
    places = [floors.index(room) for room in named.values()]
    assert places == sorted(places)


def test_architecture_page_marks_top_level_folders() -> None:
    lines = re.findall(r"^(\w+)/ .*top-level folder$", PAGE, re.MULTILINE)
    links = [path.name for path in (ROOT / "agent_rl").iterdir() if path.is_symlink()]
    assert sorted(lines) == sorted(links)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))])
def test_page_links_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    files = [link for link in links if "://" not in link]
    assert not [link for link in files if not (ROOT / page).parent.joinpath(link).exists()]
