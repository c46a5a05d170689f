"""The tokens of an episode: coloured by a mode, with all that is known of the one under the cursor."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import OptionList, Static

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import Source, Span
from agent_rl.errors import AgentRLError
from agent_rl.store.token_records import token_records
from agent_rl.view.conversation import clean
from agent_rl.view.decoding import Decode, Piece, load_decoder, pieces
from agent_rl.view.shading import MODES, Shading, shadings
from agent_rl.view.text import short_id
from agent_rl.view.tui.base import Level

WINDOW = 600
"""Tokens that are shown at a time."""


class TokensScreen(Level):
    """A list of spans, and the tokens of the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "token", priority=True),
        Binding("right", "move(1)", "token", priority=True),
        Binding("m", "mode", "colours"),
    ]

    def __init__(self, path: Path, episode: Episode, turn: int) -> None:
        super().__init__(f"{path} · {short_id(episode.id)} · tokens")
        self._path, self._episode = path, episode
        self._spans = [(n, span) for n, t in enumerate(episode.trajectories) for span in t.spans]
        at = (i for i, (_, s) in enumerate(self._spans) if s.turn == turn and s.source is Source.POLICY)
        self._first = next(at, 0)
        self._cursor = 0
        self._mode, self._shadings = "logprob", shadings(episode.trajectories, "logprob")
        self._decode: Decode | None = None
        self._ids: list[int] = []
        self._start = 0
        self._pieces: list[Piece] = []

    def body(self) -> ComposeResult:
        """Lay out spans and text."""
        entries = (_entry(span) for _, span in self._spans)
        yield Horizontal(OptionList(*entries, id="list", markup=False), VerticalScroll(Static(id="text")), id="body")

    def on_mount(self) -> None:
        """Show the first span of the turn."""
        try:
            self._decode = load_decoder(self._path)
        except AgentRLError as error:
            self.notify(clean(str(error)), severity="warning", markup=False)
        spans = self.query_one(OptionList)
        spans.focus()
        spans.highlighted = self._first

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show a span."""
        number, span = self._spans[event.option_index]
        self._ids, self._cursor, self._pieces = self._episode.trajectories[number].token_ids.tolist(), span.start, []
        self._show(number, span)

    def action_move(self, by: int) -> None:
        """Move the cursor to another token of the span."""
        number, span = self._here()
        starts = [piece.start for piece in self._pieces]
        at = bisect_right(starts, self._cursor) - 1 + by
        if 0 <= at < len(starts):
            self._cursor = starts[at]
        elif by > 0 and self._pieces and self._pieces[-1].stop < span.stop:
            self._cursor = self._pieces[-1].stop
        elif by < 0 and self._start > span.start:
            self._cursor = self._start - 1
        self._show(number, span)

    def action_mode(self) -> None:
        """Colour by the next mode that has numbers."""
        modes = [*MODES, *MODES]
        for mode in modes[modes.index(self._mode) + 1 :]:
            try:
                records = token_records(self._path, self._episode.id) if mode in ("advantage", "ratio") else ()
                self._shadings, self._mode = shadings(self._episode.trajectories, mode, records), mode
                break
            except AgentRLError:  # no update says it
                continue
        self._show(*self._here())

    def _here(self) -> tuple[int, Span]:
        return self._spans[self.query_one(OptionList).highlighted or 0]

    def _show(self, number: int, span: Span) -> None:
        """Show the tokens around the cursor."""
        shades = self._shadings[number]
        if not self._pieces or not self._pieces[0].start <= self._cursor < self._pieces[-1].stop:
            self._start = span.start + (self._cursor - span.start) // WINDOW * WINDOW
            self._pieces = self._window(span)
        text = Text()
        if self._start > span.start:
            text.append(f"[... {plural(self._start - span.start, 'token')} before ...]\n", style="dim")
        for piece in self._pieces:
            style = shades.style(piece.start, span.source)
            chosen = piece.start <= self._cursor < piece.stop
            text.append(clean(piece.text).replace("\n", "↵\n"), style=f"{style} reverse" if chosen else style)
        if left := span.stop - self._pieces[-1].stop:
            text.append(f"\n[... {plural(left, 'token')} more: right, or another span ...]", style="dim")
        self.query_one("#text", Static).update(text)
        self.note(self._facts(number, span, shades))

    def _window(self, span: Span) -> list[Piece]:
        own = self._ids[self._start : min(self._start + WINDOW, span.stop)]
        if self._decode is not None:
            return pieces(own, self._decode, self._start)
        return [Piece(f"{'' if not n else ' '}{id}", self._start + n, self._start + n + 1) for n, id in enumerate(own)]

    def _facts(self, number: int, span: Span, shades: Shading) -> Text:
        trajectory = self._episode.trajectories[number]
        said = f"{self._cursor:,}: id {self._ids[self._cursor]}, {span.source}, turn {span.turn}"
        if span.source is Source.POLICY:
            said += f", logprob {float(trajectory.logprobs[self._cursor]):.3f}, version {span.policy_version}"
        if shades.mode in ("advantage", "ratio"):
            said += f", {shades.mode} {shades.number(self._cursor)}"
        text = Text(f"{said}\n").append(f"{shades.mode}: ", style="dim")
        for shade in shades.shades:
            text.append(shade.meaning, style=shade.style).append(" ")
        return text


def _entry(span: Span) -> Text:
    style = "green" if span.source is Source.POLICY else "dim"
    return Text(f"{span.turn:>3} {span.source} {span.stop - span.start:,}", style=style, no_wrap=True)
