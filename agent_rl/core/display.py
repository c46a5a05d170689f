"""The base of the nouns that notebooks show; `agent_rl.view.notebook` makes their HTML."""

from __future__ import annotations

from importlib import import_module


class Displayed:
    """Shown as HTML at the end of a notebook's cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        shown: str = import_module("agent_rl.view.notebook").show(self)  # core imports no view
        return shown
