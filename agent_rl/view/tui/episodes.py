"""The episodes of a path, filtered, sorted and searched by its index; rows are read as they are scrolled to."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Input

from agent_rl.core.display import plural
from agent_rl.errors import AgentRLError
from agent_rl.store.episodes import episode_at
from agent_rl.store.heads import Head
from agent_rl.store.index import Index, open_index
from agent_rl.store.selection import Selection, select
from agent_rl.store.shards import Place
from agent_rl.store.where import quoted
from agent_rl.view.conversation import clean
from agent_rl.view.text import short_id
from agent_rl.view.tui.base import PAGE, WIDTH, Level, table_of
from agent_rl.view.tui.episode import EpisodeScreen
from agent_rl.view.tui.groups import GroupsScreen

COLUMNS = ("id", "reward", "stop", "turns", "question", "calls", "errors", "step")
PROMPTS = {
    "where": "only episodes for which this holds, such as reward < 0.5 and stop = turns",
    "search": "only episodes in which this was said",
    "sort": "a field, such as reward; nothing for the order of the file",
}


class EpisodesScreen(Level):
    """A row an episode."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "ask('where')", "filter"),
        Binding("f", "ask('search')", "search"),
        Binding("s", "ask('sort')", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("g", "group", "its group"),
        Binding("G", "groups", "groups"),
    ]

    def __init__(self, path: Path, *, group: str = "", where: str = "", search: str = "") -> None:
        super().__init__(f"{path} · group {group}" if group else str(path))
        self._path, self._group = path, group
        self._asked = {"where": where, "search": search, "sort": ""}
        self._asking = "where"
        self._reverse = False
        self._index: Index | None = None
        self._places: list[Place] = []
        self._groups: list[str] = []
        self._fitting = self._total = 0

    def body(self) -> ComposeResult:
        """Lay out the table and the line for filters."""
        yield table_of(*COLUMNS)
        yield Input(id="where", compact=True)

    def on_mount(self) -> None:
        """Show the first page."""
        self.query_one(DataTable).focus()
        self._begin(self._asked, reverse=self._reverse)

    def on_unmount(self) -> None:
        """Close the index."""
        if self._index is not None:
            self._index.close()

    def _begin(self, asked: dict[str, str], *, reverse: bool) -> None:
        """Show the first page of what is asked for; keep what is shown if that has no meaning."""
        before = (self._asked, self._reverse)
        self._asked, self._reverse = asked, reverse
        try:
            if self._index is None:
                self._index = open_index(self._path)
            found, heads = self._page(self._index, 0)
        except AgentRLError as error:
            self._asked, self._reverse = before
            self.note(Text(clean(str(error)), style="red"))
            return
        self._places, self._fitting, self._total = list(found.places), found.fitting, found.total
        self._groups = [head.group for head in heads]
        self.query_one(DataTable).clear().add_rows(map(_row, heads))
        self._say()

    def _page(self, index: Index, offset: int) -> tuple[Selection, list[Head]]:
        """Return a page of what is asked for."""
        asked = self._asked
        group = [f"group = {quoted(self._group)}"] if self._group else []
        found = select(
            index,
            where=[*group, *filter(None, (asked["where"],))],
            search=asked["search"],
            sort=asked["sort"] or None,
            reverse=self._reverse,
            limit=PAGE,
            offset=offset,
        )
        return found, list(index.heads(found.places))

    def _say(self) -> None:
        asked = [f"{name} {value}" for name, value in self._asked.items() if value]
        count = f"{self._fitting:,} of {plural(self._total, 'episode')}"
        self.note("; ".join([count, *asked, *(["reversed"] if self._reverse else []), "enter opens one"]))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Read another page when the last rows are near."""
        if (
            self._index is not None
            and len(self._places) < self._fitting
            and event.cursor_row >= len(self._places) - PAGE // 4
        ):
            found, heads = self._page(self._index, len(self._places))
            self._places += found.places
            self._groups += [head.group for head in heads]
            self.query_one(DataTable).add_rows(map(_row, heads))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open an episode."""
        self.open(event.cursor_row)

    def open(self, row: int) -> None:
        """Open the episode of a row."""
        try:
            episode = episode_at(self._path, self._places[row])
        except AgentRLError as error:
            self.note(Text(clean(str(error)), style="red"))
        else:
            self.app.push_screen(EpisodeScreen(self._path, episode))

    def action_ask(self, name: str) -> None:
        """Ask for a filter, a text or an order."""
        self._asking = name
        line = self.query_one("#where", Input)
        line.value, line.placeholder = self._asked[name], PROMPTS[name]
        line.add_class("shown")
        line.focus()
        self.note(f"{name}: {PROMPTS[name]}")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show what fits."""
        self._close_line()
        self._begin({**self._asked, self._asking: event.value.strip()}, reverse=self._reverse)

    def action_reverse(self) -> None:
        """Turn the order around."""
        self._begin(self._asked, reverse=not self._reverse)

    def action_group(self) -> None:
        """Show the episodes of the row's group."""
        row = self.query_one(DataTable).cursor_row
        if not self._group and row < len(self._groups):
            self._open_group(self._groups[row])

    def _open_group(self, group: str) -> None:
        self.app.push_screen(EpisodesScreen(self._path, group=group))

    def action_groups(self) -> None:
        """List the groups of what fits the filter."""
        if self._index is not None and not self._group:
            self.app.push_screen(GroupsScreen(self._path, self._index, self._asked["where"], self._open_group))

    def action_back(self) -> None:
        """Close the line for filters, or go one level up."""
        if self.query_one("#where", Input).has_class("shown"):
            self._close_line()
            self._say()
        else:
            super().action_back()

    def _close_line(self) -> None:
        self.query_one("#where", Input).remove_class("shown")
        self.query_one(DataTable).focus()


def _row(head: Head) -> list[Text]:
    style = "red" if head.reward is None else "green" if head.success else ""
    reward = "failed" if head.reward is None else f"{head.reward:.4g}"
    numbers = (head.calls, head.errors, "" if head.step is None else head.step)
    return [
        Text(clean(short_id(head.id))),
        Text(reward, style=style, justify="right"),
        Text(clean(head.stop)),
        Text(str(head.turns), justify="right"),
        Text(clean(head.question[:WIDTH])),
        *(Text(str(number), justify="right") for number in numbers),
    ]
