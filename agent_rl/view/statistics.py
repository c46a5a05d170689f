"""A run's statistics in a terminal: tables of its tallies, and what went wrong in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.core.display import plural
from agent_rl.core.sequences import shared_start
from agent_rl.rollout.comparison import Comparison
from agent_rl.stats.departures import Departure, DepartureKind, Departures
from agent_rl.stats.diff import Evidence
from agent_rl.stats.statistics import Statistics, ToolUse
from agent_rl.stats.tally import Spread, Tally
from agent_rl.view.conversation import clean
from agent_rl.view.results import say
from agent_rl.view.tables import print_whole
from agent_rl.view.verdicts import counted

TOP, LISTED = 5, 30
"""Kinds of departures that are shown without --departures; tags and tools of a table."""
CLIP, SHARED = 60, 15
"""Characters of a text that are shown, and of what it has in common with the other before they differ."""
Commands: TypeAlias = Callable[[Departure | str], Sequence[str]]
"""Returns the commands that show a departure, or an episode."""


def print_statistics(found: Statistics, console: Console, *, first_step: int, measured: Mapping[str, float]) -> None:
    """Print everything but what went wrong.

    Args:
        found: of a run.
        console: where to print.
        first_step: the number of the run's first training step.
        measured: means of the run's own metrics of time, by name.
    """
    print_whole(_tag_table(found), console)
    console.print()
    _print_endings(found, console)
    _print_tools(found, console)
    print_whole(_size_table(found), console)
    console.print()
    _print_rewards(found, console)
    times = {name: seconds for name, seconds in found.parts.items() if seconds}
    say(console, "seconds in all: " + ", ".join(f"{name} {seconds:,.0f}" for name, seconds in times.items()))
    if measured:
        say(console, "mean of a step: " + ", ".join(f"{name} {value:.3g}" for name, value in measured.items()))
    if ages := found.staleness(first_step):
        mean = sum(age * share for age, share in ages.items())
        shares = ", ".join(f"{share:.1%} {plural(age, 'update')}" for age, share in ages.items())
        say(console, f"staleness of sampled tokens: {mean:.3g} updates on average, {max(ages)} at most ({shares})")
    if found.replies:
        drift = f"{found.drifted:,} of {found.replies:,} sampled replies ({found.drifted / found.replies:.2%})"
        say(console, f"re-tokenisation drift: {drift} come out as other ids when their text is encoded")
    if found.judgements:
        why = f" ({counted(found.faults)})" if found.faults else ""
        count, unscored, suspect = found.judgements, found.unscored_judgements, found.suspect
        say(console, f"judgements: {count:,}, {unscored:,} not scored{why}, {suspect:,} suspect")


def print_comparison(
    first: Statistics, second: Statistics, compared: Mapping[tuple[str, str], Sequence[Comparison]], console: Console
) -> None:
    """Print how two runs differ: by the tasks that both have, and in how their episodes and calls ended."""
    table = _table("", "measure", "tasks", "A", "B", "B - A (95 % interval)", "p", text=2)
    for (key, tag), comparisons in compared.items():
        for c in comparisons:
            low, high = c.interval
            interval = "" if math.isnan(low) else f" ({low:+,.3f} to {high:+,.3f})"
            numbers = (f"{c.first:,.3f}", f"{c.second:,.3f}", f"{c.difference:+,.3f}{interval}")
            table.add_row(plain(f"{key} {tag}" if key else "all"), c.measure, f"{c.tasks:,}", *numbers, f"{c.p:.2g}")
    print_whole(table, console)
    for comparison in compared.get(("", ""), ())[:1]:
        only = ((comparison.only_first, "A"), (comparison.only_second, "B"))
        left_out = "".join(f"; {count:,} that only {name} has scored are left out" for count, name in only if count)
        say(console, f"over {plural(comparison.tasks, 'task')} that both have{left_out}\n")
    shares = _table("share", "A", "B", "B - A")
    for name, (a, b) in _shares(first, second).items():
        shares.add_row(plain(name), f"{a:.1%}", f"{b:.1%}", f"{100 * (b - a):+.1f} points")
    console.print(shares)


def print_departures(
    found: Departures,
    episodes: int,
    evidence: Mapping[Departure, Evidence],
    console: Console,
    *,
    commands_of: Commands,
    most: int | None,
) -> None:
    """Print what went wrong, the most frequent first.

    Args:
        found: of a run.
        episodes: how many there are.
        evidence: of the examples that are shown.
        console: where to print.
        commands_of: returns the commands that show an example.
        most: how many kinds to show; None for all.
    """
    successful = "one of the best of its task" if found.by_reward else "a successful episode of its task"
    unknown = f"; of {found.unknown:,} it is not known" if found.unknown else ""
    say(console, f"\nWhat went wrong? {found.failed:,} of {plural(episodes, 'episode')} did not succeed{unknown}.")
    if found.compared:
        say(console, f"Where {found.compared:,} of them first depart from {successful}:\n")
    for kind in found.kinds[:most]:
        _print_kind(kind, found.compared, evidence, console, commands_of)
    if most is not None and (rest := found.kinds[most:]):
        say(
            console,
            f"and {plural(sum(k.episodes for k in rest), 'episode')} in {plural(len(rest), 'other way')}, which "
            "--departures lists",
        )
    if found.unsolved_tasks:
        unsolved = "whose episodes all scored the same" if found.by_reward else "that no episode solved"
        count = sum(found.unsolved.values())
        say(
            console,
            f"{plural(found.unsolved_tasks, 'task')} {unsolved}: {plural(count, 'episode')}, which ended: "
            f"{counted(found.unsolved)}",
        )
    for line in commands_of(found.unsolved_example) if found.unsolved_example else ():
        say(console, f"         {line}")
    if found.left_out:
        say(console, f"{found.left_out:,} failed episodes were not compared: --where selects fewer")


def _print_kind(
    kind: DepartureKind, compared: int, evidence: Mapping[Departure, Evidence], console: Console, commands_of: Commands
) -> None:
    first, last = min(kind.turns), max(kind.turns)
    turns = f"turn {first}" if first == last else f"turns {first} to {last}, most at {kind.turns.most_common(1)[0][0]}"
    tasks = f"{len(kind.tasks):,} task{'s' * (len(kind.tasks) != 1)}"
    step = "" if kind.last_step is None else f", last in step {kind.last_step}"
    head = Text(f"{kind.episodes:6,} ({kind.episodes / compared:.0%})  ", style="bold")
    head.append(clean(kind.what), style="bold cyan").append(f"  {tasks}, {turns}{step}", style="dim")
    console.print(head, soft_wrap=True)
    if kind.example is None:
        return
    if (shown := evidence.get(kind.example)) and (shown.did or shown.instead_of):
        did, instead = clipped(shown.did, shown.instead_of)
        parts = (did, f"instead of  {instead}" if instead else "")
        say(console, clean("         " + "  ".join(filter(None, parts))))
    for line in commands_of(kind.example):
        say(console, f"         {line}")


def clipped(first: str, second: str) -> tuple[str, str]:
    """Return two texts on a line each, from shortly before where they differ."""
    one, other = (" ".join(text.split()) for text in (first, second))
    same = shared_start(one, other)
    start = same - SHARED if same > 2 * SHARED else 0
    return tuple(_clip(text, start) for text in (one, other))  # type: ignore[return-value]  # of two


def _clip(text: str, start: int) -> str:
    shown = text[start : start + CLIP]
    return ("…" if start and shown else "") + shown + ("…" if start + CLIP < len(text) else "")


def _tag_table(found: Statistics) -> Table:
    """Return the table of success and reward, with 95 % intervals over tasks."""
    table = _table("", "episodes", "tasks", "success", "reward", *(["failed"] if found.total.failed else []))
    width = len(table.columns) - 1
    table.add_row("all", *_tallied(found.total)[:width])
    for key, tallies in found.tags.items():
        table.add_row(plain(f"by {key}"), style="dim")
        for tag, tally in list(tallies.items())[:LISTED]:
            table.add_row(plain(f"  {tag}"), *_tallied(tally)[:width])
        if (more := len(tallies) - LISTED) > 0:
            table.add_row(f"  and {more:,} more: --json")
    return table


def _tallied(tally: Tally) -> tuple[str, ...]:
    low, high = (100 * bound for bound in tally.success_interval)
    least, most = tally.reward_interval
    success = f"{tally.success.share} ({low:.1f} to {high:.1f})" if tally.success.n else "unknown"
    interval = "" if math.isnan(least) else f" ({least:.3f} to {most:.3f})"
    reward = "unknown" if math.isnan(tally.reward) else f"{tally.reward:.3f}{interval}"
    return (f"{tally.episodes:,}", f"{len(tally.tasks):,}", success, reward, f"{tally.failed:,}")


def _print_endings(found: Statistics, console: Console) -> None:
    say(console, f"endings: {_with_shares(found.endings)}")
    say(console, f"stop reasons: {_with_shares(found.stops)}")
    if found.failures:
        say(console, clean(f"failures: {counted(dict(found.failures.most_common(LISTED)))}"))


def _with_shares(counts: Counter[str]) -> str:
    total = counts.total()
    return ", ".join(f"{count:,} {name} ({count / total:.1%})" for name, count in counts.most_common())


def _print_tools(found: Statistics, console: Console) -> None:
    if not found.tools and not found.malformed:
        return
    console.print()
    table = _table("tool", "calls", "errors", "by class", text=1)
    _let_wrap(table)
    ranked = sorted(found.tools.items(), key=lambda each: -each[1].calls)
    for name, use in ranked[:LISTED]:
        errors = use.errors.total()
        table.add_row(plain(name), f"{use.calls:,}", f"{errors / use.calls:.1%}", counted(use.errors))
    print_whole(table, console)
    if found.malformed:
        say(console, f"calls that can't be read: {found.malformed:,}")


def _size_table(found: Statistics) -> Table:
    table = _table("of an episode", "mean", "quartiles", "max")
    for name, spread in found.spreads().items():
        table.add_row(name, *_spread(spread))
    table.add_row("seconds", *_spread(found.seconds.spread))
    return table


def _spread(spread: Spread) -> tuple[str, str, str]:
    quartiles = " / ".join(f"{value:,.4g}" for value in (spread.lower, spread.median, spread.upper))
    return f"{spread.mean:,.4g}", quartiles, f"{spread.max:,.6g}"


def _print_rewards(found: Statistics, console: Console) -> None:
    if not found.rewards:
        return
    table = _table("reward", "weight", "mean", "of", "not scored", "why")
    _let_wrap(table)
    for name, component in found.rewards.items():
        n = component.values.count
        share = component.unscored / (n + component.unscored)
        mean = f"{component.values.mean:.3f}" if n else ""
        why = plain(counted(component.errors))
        table.add_row(plain(name), f"{component.weight:g}", mean, f"{n:,}", f"{share:.1%}", why)
    print_whole(table, console)
    console.print()


def _shares(first: Statistics, second: Statistics) -> dict[str, tuple[float, float]]:
    """Return the share of episodes with each stop reason, and of each tool's calls that failed, of two runs."""
    found = {}
    for stop in {**first.stops, **second.stops}:
        one, other = (run.stops[stop] / run.stops.total() for run in (first, second))
        found[f"episodes that stopped: {stop}"] = (one, other)
    for name in list({**first.tools, **second.tools})[:LISTED]:
        uses = (run.tools.get(name, ToolUse()) for run in (first, second))
        one, other = (use.errors.total() / max(1, use.calls) for use in uses)
        found[f"calls that failed: {name}"] = (one, other)
    return found


def _let_wrap(table: Table) -> None:
    """Make a table's last column one of text that takes several lines."""
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False


def plain(text: str) -> Text:
    """Return a text for a table, in which nothing is markup."""
    return Text(clean(text))


def _table(*titles: str, text: int = 1) -> Table:
    """Return a table whose first columns are text, and the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, title in enumerate(titles):
        table.add_column(title, justify="left" if at < text else "right", no_wrap=True)
    return table
