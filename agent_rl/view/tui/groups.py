"""The groups of a path: a row for the samples of one task, read as they are scrolled to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable

from agent_rl.core.display import plural
from agent_rl.store.index import GroupHead, Index
from agent_rl.store.where import parse_where
from agent_rl.view.conversation import clean
from agent_rl.view.tui.base import PAGE, WIDTH, Level, table_of

COLUMNS = ("group", "mean", "best", "solved", "question", "step")


class GroupsScreen(Level):
    """A row a group; of a filter, those of the episodes that fit."""

    def __init__(self, path: Path, index: Index, where: str, open_group: Callable[[str], object]) -> None:
        super().__init__(f"{path} · groups")
        self._index, self._where, self._open_group = index, parse_where([where] if where else []), open_group
        self._asked = where
        self._groups: list[GroupHead] = []
        self._is_whole = False

    def body(self) -> ComposeResult:
        """Lay out the table."""
        yield table_of(*COLUMNS)

    def on_mount(self) -> None:
        """Show the first page."""
        self.query_one(DataTable).focus()
        self._read()

    def _read(self) -> None:
        found = self._index.groups(self._where, limit=PAGE, offset=len(self._groups))
        self._groups += found
        self._is_whole = len(found) < PAGE
        self.query_one(DataTable).add_rows(map(_row, found))
        count = f"{plural(len(self._groups), 'group')}{'' if self._is_whole else ' and more'}"
        self.note("; ".join([count, *([f"where {self._asked}"] if self._asked else []), "enter opens one"]))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Read another page when the last rows are near."""
        if not self._is_whole and event.cursor_row >= len(self._groups) - PAGE // 4:
            self._read()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the episodes of a group, those that don't fit the filter, too."""
        self._open_group(self._groups[event.cursor_row].group)


def _row(group: GroupHead) -> list[Text]:
    rewards = ("" if value is None else f"{value:.3g}" for value in (group.reward, group.best))
    solved = Text(f"{group.solved} of {group.episodes}", style="green" if group.solved else "", justify="right")
    return [
        Text(clean(group.group)),
        *(Text(reward, justify="right") for reward in rewards),
        solved,
        Text(clean(group.question[:WIDTH])),
        Text("" if group.step is None else str(group.step), justify="right"),
    ]
