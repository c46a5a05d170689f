"""`agent-rl stats`: a run in numbers, its first departures, and the differences of two runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from agent_rl.backends.settings import backend_of
from agent_rl.cli.fit import print_fit
from agent_rl.cli.view import paged
from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, without_nan
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.rollout.comparison import NOTHING_IN_COMMON
from agent_rl.runs.commands import command
from agent_rl.runs.folder import CONFIG, METRICS
from agent_rl.runs.metrics import read_metrics
from agent_rl.stats.departures import Departure, Departures
from agent_rl.stats.diff import Evidence, evidence_of
from agent_rl.stats.statistics import Statistics, compare_statistics, statistics_of
from agent_rl.stats.tally import Tally
from agent_rl.store.episodes import read_episodes
from agent_rl.store.selection import episodes_of, select
from agent_rl.store.shards import episode_file
from agent_rl.view.conversation import clean
from agent_rl.view.decoding import load_round_trip
from agent_rl.view.statistics import TOP, print_comparison, print_departures, print_statistics


def stats(arguments: argparse.Namespace) -> int:
    """Print the statistics of a run, or how two differ.

    Raises:
        StoreError: if there is no such file, or a line can't be read.
        ConfigError: if no episode fits, a filter or an option beside others has no meaning, or two runs have no scored
            task in common.
    """
    if arguments.fit is not None:
        options = {"RUN2": "second", "--by": "by", "--where": "where", "--departures": "departures"}
        if given := [option for option, name in options.items() if getattr(arguments, name)]:
            raise ConfigError(f"--fit reads the metrics of one run: leave out {', '.join(given)}")
        return print_fit(arguments)
    if arguments.svg is not None:
        raise ConfigError("--svg draws a fit: give --fit, too")
    if arguments.departures and arguments.second is not None:
        raise ConfigError("--departures lists what went wrong in one run: give one")
    found = _read(arguments.first, arguments)
    if arguments.second is not None:
        return _compare(found, _read(arguments.second, arguments), arguments)
    return _describe(found, arguments)


def _describe(found: Statistics, arguments: argparse.Namespace) -> int:
    """Print the statistics of one run, and where its failures depart from its successes."""
    if arguments.where and found.finder.has_failures_only:
        found.finder.add_successful(_episodes(arguments.first, ["success=yes"]))
    departures = found.finder.find()
    shown = departures.kinds if arguments.json or arguments.departures else departures.kinds[:TOP]
    examples = [kind.example for kind in shown if kind.example is not None]
    evidence = _evidence(arguments.first, examples)
    first_step, measured = _of_run(arguments.first)
    if arguments.json:
        table = _table(found, first_step, measured) | {"departures": _departures(departures, evidence)}
        print(json.dumps(without_nan(table), indent=2))
        return 0
    with paged() as console:
        print_statistics(found, console, first_step=first_step, measured=measured)
        print_departures(
            departures,
            found.total.episodes,
            evidence,
            console,
            commands_of=lambda example: _commands(arguments.first, example),
            most=None if arguments.departures else TOP,
        )
    return 0


def _read(file: str, arguments: argparse.Namespace) -> Statistics:
    found = statistics_of(_episodes(file, arguments.where), arguments.by, load_round_trip(file))
    if not found.total.episodes:
        raise ConfigError(f"{file}: no episode {'fits' if arguments.where else 'yet'}")
    return found


def _episodes(file: str, where: Sequence[str]) -> Iterator[Episode]:
    return select(file, where=where, limit=2**62).episodes() if where else read_episodes(file)


def _compare(first: Statistics, second: Statistics, arguments: argparse.Namespace) -> int:
    compared = compare_statistics(first, second)
    if ("", "") not in compared:
        raise ConfigError(NOTHING_IN_COMMON)
    if arguments.json:
        rows = [{"by": key, "tag": tag, **asdict(c)} for (key, tag), found in compared.items() for c in found]
        runs = [_table(found, *_of_run(file)) for found, file in ((first, arguments.first), (second, arguments.second))]
        print(json.dumps(without_nan({"compared": rows, "first": runs[0], "second": runs[1]}), indent=2))
        return 0
    print_comparison(first, second, compared, Console())
    return 0


def _commands(file: str, departure: Departure | str) -> tuple[str, ...]:
    """Return the commands that show a departure, or an episode."""
    if isinstance(departure, str):
        return (command("view", file, clean(departure)),)
    one, other = clean(departure.episode), clean(departure.successful)
    return command("view", file, one, "--turn", str(departure.turn)), command("diff", file, one, other)


def _evidence(file: str, examples: Sequence[Departure]) -> dict[Departure, Evidence]:
    """Return what the examples and the episodes that they are compared with did, in their own words."""
    episodes = episodes_of(file, {id for example in examples for id in (example.episode, example.successful)})
    return {e: evidence_of(e, episodes[e.episode], episodes[e.successful]) for e in examples}


def _of_run(file: str) -> tuple[int, dict[str, float]]:
    """Return the number of a run's first training step, and the means of its own metrics of time."""
    folder = Path(episode_file(file)).parent
    try:
        first_step = int((folder / CONFIG).exists() and backend_of(folder) == "verl")
    except CheckpointError:
        first_step = 0
    series: dict[str, list[float]] = {}
    for row in read_metrics(folder / METRICS):
        for name, value in row.items():
            if name.startswith("perf/") and isinstance(value, int | float):
                series.setdefault(name, []).append(value)
    return first_step, {name: float(np.mean(values)) for name, values in series.items()}


def _table(found: Statistics, first_step: int, measured: Mapping[str, float]) -> dict[str, JSON]:
    """Return all numbers of a run, as JSON holds them."""
    return {
        "all": _tally(found.total),
        "by": {key: {tag: _tally(tally) for tag, tally in tallies.items()} for key, tallies in found.tags.items()},
        "endings": dict(found.endings),
        "stop_reasons": dict(found.stops),
        "failures": dict(found.failures),
        "tools": {name: {"calls": use.calls, "errors": dict(use.errors)} for name, use in found.tools.items()},
        "unreadable_calls": found.malformed,
        "sizes": {name: asdict(spread) for name, spread in found.spreads().items()},
        "seconds": asdict(found.seconds.spread),
        "seconds_in_all": dict(found.parts),
        "metrics": dict(measured),
        "staleness": {str(age): share for age, share in found.staleness(first_step).items()},
        "forks": found.forks,
        "drift": {"replies": found.replies, "drifted": found.drifted},
        "rewards": {
            name: {
                "weight": component.weight,
                "mean": component.values.mean,
                "scored": component.values.count,
                "unscored": component.unscored,
                "errors": dict(component.errors),
            }
            for name, component in found.rewards.items()
        },
        "judgements": {
            "count": found.judgements,
            "unscored": found.unscored_judgements,
            "suspect": found.suspect,
            "faults": dict(found.faults),
        },
    }


def _tally(tally: Tally) -> dict[str, JSON]:
    return {
        "episodes": tally.episodes,
        "tasks": len(tally.tasks),
        "failed": tally.failed,
        "known": tally.success.n,
        "success": tally.success.value,
        "success_interval": tally.success_interval,
        "reward": tally.reward,
        "reward_interval": tally.reward_interval,
    }


def _departures(found: Departures, evidence: Mapping[Departure, Evidence]) -> dict[str, JSON]:
    kinds: list[JSON] = []
    for kind in found.kinds:
        example = kind.example
        assert example is not None
        shown = evidence[example]
        kinds.append(
            {
                "what": kind.what,
                "episodes": kind.episodes,
                "tasks": len(kind.tasks),
                "turns": {str(turn): count for turn, count in sorted(kind.turns.items())},
                "example": {
                    **asdict(example),
                    "did": shown.did,
                    "instead_of": shown.instead_of,
                    "token": None if shown.token is None else asdict(shown.token),
                    "link": f"#/episode/{example.episode}/turn/{example.turn}",
                },
            }
        )
    return {
        "failed": found.failed,
        "unknown": found.unknown,
        "compared": found.compared,
        "kinds": kinds,
        "unsolved_tasks": found.unsolved_tasks,
        "unsolved": dict(found.unsolved),
        "unsolved_example": found.unsolved_example,
        "left_out": found.left_out,
        "by_reward": found.by_reward,
    }
