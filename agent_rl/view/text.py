"""Episodes as text in a terminal: one in full, or many as a table."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, Outcome, Reward
from agent_rl.core.messages import JSON, Message, ToolCall
from agent_rl.core.trajectory import Trajectory
from agent_rl.core.turns import Turn, turns
from agent_rl.errors import ConfigError
from agent_rl.rollout.usage import total_usage
from agent_rl.store.heads import Head
from agent_rl.store.token_records import TokenRecord
from agent_rl.view.conversation import call_arguments, clean, folded
from agent_rl.view.decoding import Decode
from agent_rl.view.shading import shadings
from agent_rl.view.tables import print_whole
from agent_rl.view.tokens import legend, print_tokens
from agent_rl.view.verdicts import print_judgement

Show: TypeAlias = Callable[[str], str]
"""Makes a text harmless to the terminal, and short enough to read."""

_RANDOM = re.compile("[0-9a-f]{32}")
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_episode(
    episode: Episode,
    console: Console,
    *,
    tokens: str | None = None,
    records: Sequence[TokenRecord] = (),
    decode: Decode | None = None,
    full: bool = False,
    first_turn: int = 0,
) -> None:
    """Print one episode, made harmless to the terminal: what it is, its rewards, the conversation turn by turn.

    Args:
        episode: what to print.
        console: where.
        tokens: the mode in which to print the trajectories, token by token, too; None for not at all.
        records: of the episode, which some modes need.
        decode: as of `print_tokens`.
        full: whether to print long texts whole, and not folded.
        first_turn: the turn to begin at, after the opening.

    Raises:
        ConfigError: if there is no such mode or turn, or no record that it needs.
    """
    if first_turn and first_turn > (last := max((t.index or 0 for t in turns(episode)), default=0)):
        raise ConfigError(f"there is no turn {first_turn}: the last of this episode is {last}, the first 0")
    shades = shadings(episode.trajectories, tokens, records) if tokens else []
    show = clean if full else folded_clean
    print_summary(episode, console, show)
    console.print()
    for turn in turns(episode):
        if turn.index is None or turn.index >= first_turn:
            _print_turn(turn, console, show)
        elif turn.index == first_turn - 1:
            before = f"\n[... {plural(first_turn, 'turn')} before, shown without --turn ...]"
            console.print(Text(before, style="dim"))
    if episode.error is not None:
        where = f"failed in {episode.error.where}: {episode.error.type}: {episode.error.message}"
        console.print(Text(f"\n{show(where)}", style="bold red"))
        console.print(Text(show(episode.error.traceback), style="dim"))
    explained = None
    for number, (shade, trajectory) in enumerate(zip(shades, episode.trajectories, strict=False)):
        if (explains := legend(shade, console)) != explained:
            console.print()
            console.print(explained := explains)
        size = plural(len(trajectory), "token")
        title = f"trajectory {number}: {size}, {trajectory.sampled:,} sampled{_origin(trajectory)}"
        console.print(Rule(Text(title), align="left", style="dim"))
        print_tokens(trajectory, shade, console, decode=decode, full=full)


def _origin(trajectory: Trajectory) -> str:
    fork = trajectory.forked_from
    if fork is None:
        return ""
    if fork.delegated and not fork.position:
        return f", a sub-agent of {fork.parent}"
    return f", forked from {fork.parent} at token {fork.position}"


def print_summary(episode: Episode, console: Console, show: Show) -> None:
    """Print what an episode is and what it earned, without what was said, made harmless to the terminal by `show`."""
    console.print(Rule(Text(clean(episode.id), style="bold"), align="left"))
    console.print(_facts(episode, show))
    if episode.rewards:
        console.print(Padding(_reward_table(episode), (1, 0, 0, 0), expand=False))
    for judgement in episode.judgements:
        console.print()
        print_judgement(judgement, console, show)


def print_table(heads: Iterable[Head], console: Console, also: str | None = None) -> None:
    """Print many episodes, one line each, with ids that `agent-rl view` takes; `also` is one more field to show."""
    titles = ["id", "reward", "stop", "turns", "calls", "errors"]
    shown = also if also not in (None, "question", *titles) else None
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (*titles, *([shown] if shown else [])):
        table.add_column(title, no_wrap=True, justify="left" if title in ("id", "stop") else "right")
    table.add_column("question", overflow="fold")  # gives way on a narrow console
    ids = table.columns[0]
    ids.overflow = "fold"
    for head in heads:
        name = Text(clean(short_id(head.id)))
        ids.no_wrap &= name.cell_len <= console.width - 40  # what the numbers and some of the question take
        table.add_row(
            name,
            reward_text(head),
            Text(head.stop, style="red" if head.outcome == Outcome.FAILED else ""),
            str(head.turns),
            str(head.calls),
            Text(str(head.errors), style="red" if head.errors else "dim"),
            *([_field_text(head.value(shown))] if shown else []),
            Text(clean(head.question), no_wrap=True, overflow="ellipsis"),
        )
    print_whole(table, console)


def _field_text(value: JSON) -> Text:
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    words = {None: "none", True: "yes", False: "no"}
    return Text(words[value] if value is None or isinstance(value, bool) else clean(str(value)[:40]))


def short_id(episode_id: str) -> str:
    """Return the beginning of a random id that tells it from any other, and any other id whole."""
    return episode_id[:12] if _RANDOM.fullmatch(episode_id) else episode_id


def failure_lines(episodes: Iterable[Episode], most: int = 5) -> list[str]:
    """Return why episodes failed or are not scored, counted: the `most` frequent reasons, and a line for the others."""
    counted = Counter(found for episode in episodes if (found := _failure(episode)))
    lines = [f"{count} {what}: {reason}" for (what, reason), count in counted.most_common(most)]
    others = counted.total() - sum(count for _, count in counted.most_common(most))
    return [*lines, f"{others} failed or are not scored for other reasons"] if others else lines


def _failure(episode: Episode) -> tuple[str, str] | None:
    """Return what became of an episode, and why; None if it was scored."""
    if episode.error is not None:
        return "failed", f"{episode.ending}: {episode.error.type}: {_in_a_line(episode.error.message)}"
    broken = (r for r in episode.rewards if r.value is None and r.weight and r.error is not None)
    return next((("not scored", f"{_kind(r)} {clean(r.name)}: {_in_a_line(r.error or '')}") for r in broken), None)


def _kind(reward: Reward) -> str:
    return "group reward" if reward.source == "group" else "reward"


def _in_a_line(text: str) -> str:
    return " ".join(clean(text).split())


def folded_clean(text: str) -> str:
    """Return a text made harmless to the terminal, and short enough to read."""
    return clean(folded(text))


def _facts(episode: Episode, show: Show) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in _fact_rows(episode, show):
        grid.add_row(Text(name, style="dim"), value)
    return grid


def _fact_rows(episode: Episode, show: Show) -> Iterator[tuple[str, Text]]:
    yield "env", Text(clean(episode.env))
    yield "task", Text(show(json.dumps(episode.task, ensure_ascii=False, default=str)))
    ended = Text(f"{episode.ending}, {episode.stop_reason}", style="" if episode.trainable else "bold red")
    yield "ended", ended + Text(f" after {plural(episode.turns, 'turn')}, {episode.seconds:.1f} s", style="default")
    yield "reward", reward_text(episode)
    if episode.tool_errors:
        errors = ", ".join(f"{count} {kind}" for kind, count in sorted(episode.tool_errors.items()))
        yield "tool errors", Text(errors, style="red")
    if episode.usage:
        used = total_usage([episode])
        shown = f"{used.input_tokens:,} in, {used.output_tokens:,} out, {used.attempts} attempts"
        yield "used", Text(clean(f"{shown} of {episode.usage[0].model}"))
    yield "group", Text(clean(f"{episode.group_id}, seed {episode.seed}"))
    if episode.parent is not None:
        yield "forked from", Text(clean(f"{episode.parent[0]} at turn {episode.parent[1]}"))
    if episode.versions:
        yield "versions", Text(clean(", ".join(f"{k} {v}" for k, v in episode.versions.items())))


def reward_text(episode: Episode | Head) -> Text:
    """Return an episode's reward, or why it has none."""
    if episode.reward is None:
        return Text("not scored" if episode.outcome != Outcome.FAILED else "failed", style="red")
    return Text(f"{episode.reward:.4g}", style="bold green" if episode.success else "bold")


def _reward_table(episode: Episode) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    is_broken = any(reward.error is not None for reward in episode.rewards)
    for title in ("reward", "value", "weight", "turn", "source", *(["error"] if is_broken else [])):
        table.add_column(title, justify="right" if title in ("value", "weight", "turn") else "left")
    for reward in episode.rewards:
        value = "not scored" if reward.value is None else f"{reward.value:.4g}"
        numbers = (value, f"{reward.weight:g}", "all" if reward.turn is None else str(reward.turn))
        error = [Text(_in_a_line(reward.error or ""), style="red")] if is_broken else []
        table.add_row(Text(clean(reward.name)), *numbers, Text(clean(reward.source)), *error)
    return table


def _print_turn(turn: Turn, console: Console, show: Show) -> None:
    if turn.index is not None:
        title = Text(f"turn {turn.index}", style="dim")
        if turn.reward:
            title.append(f" · reward {turn.reward:.4g}", style="bold")
        console.print(Padding(Rule(title, align="left", style="dim"), (1, 0, 0, 0)))
    for message in turn.messages:
        print_message(message, console, show)


def print_message(message: Message, console: Console, show: Show) -> None:
    """Print a message, made harmless to the terminal by `show`."""
    for part in message_parts(message, show):
        console.print(part)


def message_parts(message: Message, show: Show) -> Iterator[RenderableType]:
    """Yield what to print of a message, made harmless to the terminal by `show`."""
    title = Text(message.role, style=f"bold {_ROLE_STYLES[message.role]}")
    if message.name:
        title.append(f" {clean(message.name)}")
    if message.tool_error is not None:
        title.append(f"  ✗ {message.tool_error}", style="bold red")
    yield title
    if message.reasoning:
        yield _indented(Text(show(message.reasoning), style="dim italic"))
    if message.content:
        yield _indented(Text(show(message.content)))
    for call in message.tool_calls:
        yield _indented(_call_text(call, show))


def _call_text(call: ToolCall, show: Show) -> Text:
    arguments = show(call_arguments(call.arguments))
    shown = Text("→ ", style="bold").append(clean(call.name), style="bold").append(f"({arguments})")
    if call.error is not None:
        shown.append(f"  ✗ {show(call.error)}", style="bold red")
    return shown


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2), expand=False)
