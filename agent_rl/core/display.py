"""How things are shown: nouns in notebooks, whose HTML `agent_rl.view.notebook` makes, counts and paths in messages."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


class Displayed:
    """Shown as HTML at the end of a notebook's cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        shown: str = import_module("agent_rl.view.notebook").show(self)  # core imports no view
        return shown


def plural(count: int, noun: str, several: str = "") -> str:
    """Return a count with its noun, as "1 turn" or "1,200 turns"; `several` is a plural that an s does not make."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def from_here(path: str | Path) -> str:
    """Return a path as it is typed: from the working directory if it lies there."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
