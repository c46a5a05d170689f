"""What the screens share: a title, a line of notes, keys, and text that can't act on the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Static

from agent_rl.view.conversation import clean

PAGE = 100
"""Rows that are read at a time."""
WIDTH = 40
"""Characters of a question."""


class Level(Screen[None]):
    """One level of the way from a run to a token."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace", "back", "back")]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._words = title

    def compose(self) -> ComposeResult:
        """Lay out the title, what the level shows, a note and the keys."""
        yield Static(Text(clean(self._words), no_wrap=True, overflow="ellipsis"), id="title")
        yield from self.body()
        yield Static("", id="note")
        yield Footer()

    def body(self) -> ComposeResult:
        """Lay out what the level shows."""
        yield Widget()

    def note(self, text: str | Text) -> None:
        """Show a line above the keys."""
        shown = text if isinstance(text, Text) else Text(clean(text))
        self.query_one("#note", Static).update(shown)

    def action_back(self) -> None:
        """Go one level up; from the first, leave."""
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()
        else:
            self.app.exit()


def table_of(*titles: str) -> DataTable[Text]:
    """Return an empty table; a row is chosen at a time."""
    table: DataTable[Text] = DataTable(cursor_type="row", zebra_stripes=True)
    table.add_columns(*titles)
    return table


def printed(show: Callable[[Console], object], width: int) -> Text:
    """Return what a function prints to a console, as text with its colours."""
    file = io.StringIO()
    show(Console(file=file, width=max(20, width), force_terminal=True, color_system="standard", highlight=False))
    return Text.from_ansi(file.getvalue())
