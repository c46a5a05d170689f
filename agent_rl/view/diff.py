"""Two episodes in a terminal, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, component_values
from agent_rl.core.messages import Message
from agent_rl.stats.diff import Row, Token, first_token_difference, is_same, marked, message_rows
from agent_rl.view.conversation import call_arguments, clean, folded
from agent_rl.view.decoding import Decode
from agent_rl.view.results import say

AROUND = 12
"""Tokens before the first difference that are shown."""


def print_difference(
    first: Episode, second: Episode, console: Console, *, decode: Decode | None = None, full: bool = False
) -> None:
    """Print how two episodes differ, made harmless to the terminal.

    Args:
        first: one of them.
        second: the other.
        console: where; without colours, what differs is between ⟦ and ⟧.
        decode: from token ids to text; None to print ids.
        full: whether to print long texts whole, and messages that are the same.
    """
    if is_same(first, second):
        say(console, "same: tokens, messages, rewards and end")
        return
    facts = _two_columns("", f"A: {clean(first.id)}", f"B: {clean(second.id)}")
    for name, *values in _facts(first, second):
        shown = [Text(clean(value), style="" if values[0] == values[1] else "bold") for value in values]
        facts.add_row(Text("≠" if values[0] != values[1] else " ", style="red"), Text(clean(name), style="dim"), *shown)
    console.print(facts)
    _print_tokens(first, second, console, decode)
    marks = not console.is_terminal or console.color_system is None
    table: Table | None = None
    turn: int | None = -1
    for row in message_rows(first, second):
        if row.turn != turn or table is None:
            if table is not None:
                console.print(table)
            turn, table = row.turn, Table.grid(padding=(0, 1), expand=True)
            table.add_column(width=1)
            for _ in range(2):
                table.add_column(ratio=1, overflow="fold")
            console.print(Rule(Text("opening" if turn is None else f"turn {turn}"), align="left", style="dim"))
        _add_row(table, row, marks=marks, full=full)
    if table is not None:
        console.print(table)


def _two_columns(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column()
    for title in titles:
        table.add_column(Text(title), overflow="fold")
    return table


def _facts(first: Episode, second: Episode) -> Iterator[tuple[str, str, str]]:
    """Yield a name and two values of what is known of both; tasks only where they differ."""
    one, other = _summary(first), _summary(second)
    yield from ((name, one[name], other[name]) for name in one if name != "task" or one[name] != other[name])
    earned, other_earned = component_values(first), component_values(second)
    for name in earned | other_earned:
        yield f"reward {name}", _earned(earned, name), _earned(other_earned, name)


def _summary(episode: Episode) -> dict[str, str]:
    return {
        "task": json.dumps(episode.task, ensure_ascii=False, sort_keys=True, default=str)[:200],
        "ended": f"{episode.ending}, {episode.stop_reason}, {plural(episode.turns, 'turn')}",
        "reward": _value(episode.reward),
    }


def _earned(values: Mapping[str, float | None], name: str) -> str:
    """Return what an episode earned by a component; steps that earn nothing have none."""
    return _value(values[name]) if name in values else "none"


def _value(value: float | None) -> str:
    return "not scored" if value is None else f"{value:.4g}"


def _print_tokens(first: Episode, second: Episode, console: Console, decode: Decode | None) -> None:
    found = first_token_difference(first, second)
    if not (first.trajectories and second.trajectories):
        say(console, "tokens: one of the two has none")
        return
    if found is None:
        say(console, "tokens: the same")
        return
    say(console, f"first differing token: {found.position} of trajectory {found.trajectory}")
    for name, episode, token in (("A", first, found.first), ("B", second, found.second)):
        ids = _ids_before(episode, found.trajectory, found.position)
        before = decode(ids) if decode else " ".join(map(str, ids))
        say(console, f"  {name}  …{clean(before).replace(chr(10), '↵')}{_described(token, decode)}")


def _ids_before(episode: Episode, trajectory: int, position: int) -> Sequence[int]:
    if trajectory >= len(episode.trajectories):
        return []
    ids: list[int] = episode.trajectories[trajectory].token_ids[max(0, position - AROUND) : position].tolist()
    return ids


def _described(token: Token | None, decode: Decode | None) -> str:
    if token is None:
        return " ⟦⟧  ends here"
    text = clean(decode([token.id])).replace("\n", "↵") if decode else ""
    sampled = "" if token.logprob is None else f", log-probability {token.logprob:.4g}"
    version = "" if token.policy_version is None else f", version {token.policy_version}"
    return f" ⟦{text or token.id}⟧  id {token.id}, turn {token.turn}, {token.source}{sampled}{version}"


def _add_row(table: Table, row: Row, *, marks: bool, full: bool) -> None:
    if row.is_same:
        shown = Text(_folded(row.first, full), style="dim")
        table.add_row("", shown, Text("(the same)", style="dim") if not full else shown)
        return
    pieces = marked(_folded(row.first, full), _folded(row.second, full))
    styles = ("red", "green")
    table.add_row(
        Text("≠", style="red"), *(_text(own, style, marks) for own, style in zip(pieces, styles, strict=True))
    )


def _text(pieces: Sequence[tuple[str, bool]], style: str, marks: bool) -> Text:
    text = Text()
    for piece, differs in pieces:
        text.append(f"⟦{piece}⟧" if differs and marks else piece, style=f"bold {style}" if differs else "")
    return text


def _folded(message: Message | None, full: bool) -> str:
    """Return a message as lines; an empty string for none."""
    if message is None:
        return ""
    name = f" {message.name}" if message.name else ""
    error = f" ✗ {message.tool_error}" if message.tool_error else ""
    calls = [f"→ {call.name}({call_arguments(call.arguments)}) {call.error or ''}" for call in message.tool_calls]
    said = [f"{message.role}{name}{error}", message.reasoning or "", message.content, *calls]
    text = "\n".join(part for part in said if part)
    return clean(text if full else folded(text))
