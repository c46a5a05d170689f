"""An episode: its facts, and its turns one by one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import OptionList, Static

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.core.turns import Turn, turns
from agent_rl.view.conversation import clean
from agent_rl.view.text import folded_clean, print_message, print_summary, short_id
from agent_rl.view.tui.base import Level, printed
from agent_rl.view.tui.tokens import TokensScreen


class EpisodeScreen(Level):
    """A list of turns, and what was said in the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "tokens", "tokens"),
        Binding("pagedown,space", "page", "more text"),
    ]

    def __init__(self, path: Path, episode: Episode) -> None:
        super().__init__(f"{path} · {short_id(episode.id)}")
        self._path, self._episode = path, episode
        self._turns = list(turns(episode))

    def body(self) -> ComposeResult:
        """Lay out turns and text."""
        entries = [Text("the episode"), *(_entry(turn) for turn in self._turns)]
        yield Horizontal(OptionList(*entries, id="list", markup=False), VerticalScroll(Static(id="text")), id="body")

    def on_mount(self) -> None:
        """Show the facts."""
        turns = self.query_one(OptionList)
        turns.focus()
        turns.highlighted = 0
        tokens = sum(len(trajectory) for trajectory in self._episode.trajectories)
        messages = plural(len(self._episode.messages), "message")
        self.note(f"{messages}, {plural(tokens, 'token')}; enter or t: the tokens of a turn")

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show a turn, or the episode's facts."""
        self._show(event.option_index)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open a turn's tokens."""
        self.action_tokens()

    def on_resize(self) -> None:
        """Wrap the text at the new width."""
        self._show(self.query_one(OptionList).highlighted or 0)

    def _show(self, entry: int) -> None:
        scroll = self.query_one(VerticalScroll)
        width = (scroll.size.width or self.app.size.width - 24) - 3

        def show(console: Console) -> None:
            if not entry:
                print_summary(self._episode, console, folded_clean)
                return
            for message in self._turns[entry - 1].messages:
                print_message(message, console, folded_clean)

        self.query_one("#text", Static).update(printed(show, width))
        scroll.scroll_home(animate=False)

    def action_page(self) -> None:
        """Scroll the text."""
        self.query_one(VerticalScroll).scroll_page_down(animate=False)

    def action_tokens(self) -> None:
        """Open the tokens of the turn under the cursor."""
        if not any(len(trajectory) for trajectory in self._episode.trajectories):
            self.note("this episode has no token ids")
            return
        entry = self.query_one(OptionList).highlighted or 0
        turn = self._turns[entry - 1].index if entry else None
        self.app.push_screen(TokensScreen(self._path, self._episode, turn or 0))


def _entry(turn: Turn) -> Text:
    if turn.index is None:
        return Text("opening")
    calls = [call.name for message in turn.messages[:1] for call in message.tool_calls]
    text = Text(f"{turn.index:>3} ", no_wrap=True, overflow="ellipsis")
    text.append(clean(", ".join(calls)) if calls else "answer", style="" if calls else "green")
    if turn.reward:
        text.append(f" {turn.reward:.3g}", style="bold")
    return text
