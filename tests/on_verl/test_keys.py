"""agent_rl/backends/verl/config/verl_keys.txt: its claims hold for the installed verl."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from tree import ROOT

FILE = ROOT / "agent_rl" / "backends" / "verl" / "config" / "verl_keys.txt"
ROWS = [line.split() for line in FILE.read_text().splitlines() if line and line[0] not in "#["]
READERS = sorted({reader for _, _, reader in ROWS})


def source(reader: str) -> str:
    """The source of the file, or of all files in the folder, that a reader is in."""
    found = find_spec(reader.partition("/")[0])
    assert found is not None and found.origin is not None
    place = Path(found.origin).parents[1] / reader.partition(":")[0]
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return "\n".join(file.read_text() for file in files)


def test_keys_match_the_installed_version() -> None:
    assert f"verl {version('verl')}'s config" in FILE.read_text().partition("\n")[0]


@pytest.mark.parametrize("reader", READERS)
def test_keys_name_existing_readers(reader: str) -> None:
    text, function = source(reader), reader.partition(":")[2]
    if function:  # recorded at run time
        assert function.startswith("<") or re.search(rf"\bdef {function}\b", text)
        return
    names = [name.removesuffix(".*").rpartition(".")[2] for name, _, where in ROWS if where == reader]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
