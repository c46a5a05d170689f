"""The report of a run on any backend: summary.json and report.html, both made from the run's own files."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from agent_rl.checks.floors import Floors, floors_beside
from agent_rl.core.episode import Episode, Origin
from agent_rl.core.messages import JSON, without_nan
from agent_rl.core.sandbox_loss import COUNTS_AS
from agent_rl.rollout import Rate, split_jobs
from agent_rl.runs.config import RunConfig
from agent_rl.runs.folder import EPISODES, METRICS, REPORT, SUMMARY, read_warnings
from agent_rl.runs.metrics import Metrics, Row, read_metrics
from agent_rl.store.episodes import read_episodes
from agent_rl.version import __version__
from agent_rl.view.curve import learning_curve_svg
from agent_rl.view.html import Comparison, write_report

SHOWN = 6
"""How many tasks the report shows before and after."""
PACKAGES = ("torch", "transformers", "verl", "vllm")
"""Whose versions the report says."""
SAMPLINGS = {
    "sampled": ("", "sampled"),
    "greedy": ("_greedy", "greedy"),
    "low-temperature": ("_low_temperature", "sampled at a low temperature"),
}
"""How evaluations sample: what their names in summary.json end with, and what people call them."""


class Summary(TypedDict):
    """summary.json."""

    env: str
    seed: int
    steps: int
    eval: dict[str, float]
    """Success rates on the reported split, `before` and `after`, `before_greedy` and so on; and `n`, the tasks."""
    intervals: dict[str, tuple[float, float]]
    """95 % Wilson intervals, by the names in `eval`."""
    demonstrations: dict[str, int]
    wall_s: float
    """Seconds that the run took, those before it was resumed included, up to its last row of metrics."""
    peak_rss_mib: NotRequired[float]
    floors: NotRequired[dict[str, dict[str, JSON]]]
    """What the oracle and policies without skill score on the reported split, by environment."""


def write_reports(
    folder: Path, config: RunConfig, facts: Mapping[str, str], *, peak_rss_mib: float | None = None
) -> Path:
    """Write summary.json and report.html of a finished run, with a backend's own facts; return the latter's path.

    `peak_rss_mib` is the most memory that it took, if one process has it all.
    """
    rows = read_metrics(folder / METRICS)
    ends, floors = _ends(config, rows), _floors(config, rows.wall_s)
    rates = {f"{when}{SAMPLINGS[name][0]}": rate for name, both in ends.items() for when, rate in both.items()}
    summary = _summary(config, rows, rates, floors)
    if peak_rss_mib is not None:
        summary["peak_rss_mib"] = round(peak_rss_mib, 1)
    (folder / SUMMARY).write_text(
        json.dumps(without_nan(cast(Mapping[str, JSON], summary)), indent=2) + "\n", encoding="utf-8"
    )
    before = list(islice(_evaluated(folder, config, 0), SHOWN))
    large = {f"{when.replace('_', ' ')}": f"{rate.value:.1%}" for when, rate in rates.items() if "low" not in when}
    return write_report(
        folder / REPORT,
        title=f"{config.env_id}, {config.algorithm.name}, seed {config.seed}",
        summary=large | {"seconds": f"{rows.wall_s:.0f}"},
        curve_svg=learning_curve(rows),
        narrow_curve_svg=learning_curve(rows, narrow=True),
        facts=[
            *_facts(config, summary, facts, rows),
            *((f"without skill, {env}", str(floors[env])) for env in floors),
            *(("warning", text) for text in read_warnings(folder)),
        ],
        comparisons=[Comparison(SAMPLINGS[name][1], *both.values()) for name, both in ends.items()],
        before=before,
        after=list(_evaluated(folder, config, config.steps, [e.seed for e in before])),
    )


def _ends(config: RunConfig, rows: Metrics) -> dict[str, dict[str, Rate]]:
    """Return the success on the reported split before and after the run, by those of SAMPLINGS that have both."""
    held_out = (row for row in rows if row["kind"] == "eval" and row.get("split") == config.eval.split)
    found = {(row["step"], row.get("sampling")): _rate(row) for row in held_out}
    steps = {"before": 0, "after": config.steps}
    whole = (name for name in SAMPLINGS if all((step, name) in found for step in steps.values()))
    return {name: {when: found[step, name] for when, step in steps.items()} for name in whole}


def _summary(config: RunConfig, rows: Metrics, rates: Mapping[str, Rate], floors: Mapping[str, Floors]) -> Summary:
    demonstrations = next((row for row in rows if row["kind"] == "demonstrations"), {})
    summary = Summary(
        env=config.env_id,
        seed=config.seed,
        steps=config.steps,
        eval={"n": max((rate.n for rate in rates.values()), default=0)} | {k: rate.value for k, rate in rates.items()},
        intervals={key: rate.interval for key, rate in rates.items()},
        demonstrations={key: int(str(demonstrations.get(key, 0))) for key in ("n", "failed")},
        wall_s=rows.wall_s,
    )
    if floors:
        summary["floors"] = {env: of_env.table() for env, of_env in floors.items()}
    return summary


def _floors(config: RunConfig, took: float) -> dict[str, Floors]:
    if config.eval.floors is False:
        return {}
    origin = Origin("eval", config.eval.split)
    jobs = split_jobs(config.load_env(), config.eval.n, 1, 0, origin=origin, env_args=config.env_args)
    return floors_beside(jobs, config.eval.floors, took)


def _rate(row: Row) -> Rate:
    return Rate(int(str(row["successes"])), int(str(row["n"])))


def learning_curve(rows: Metrics, *, narrow: bool = False) -> str:
    """Return a run's success over its steps as an SVG, as its report shows it; `narrow` is for a phone."""
    train = rows.series("rollout/success")  # a step on stored episodes has no rollouts
    evals = dict[int, Rate]()  # of an embedded run: the reported split before and after, the dev split in between
    for row in rows:
        if row["kind"] == "eval" and row["sampling"] != "low-temperature":
            step = int(str(row["step"]))
            if step not in evals or row["sampling"] == "sampled":
                evals[step] = _rate(row)
    return learning_curve_svg(train, sorted(evals.items()), narrow=narrow)


def _evaluated(folder: Path, config: RunConfig, step: int, seeds: Sequence[int] = ()) -> Iterator[Episode]:
    """Yield an evaluation's first episode for each seed, or for each of some: sampled ones, which are stored first."""
    found = set[int]()
    for episode in read_episodes(folder / EPISODES):
        origin = episode.origin
        if (origin.purpose, origin.split, origin.step) != ("eval", config.eval.split, step) or episode.seed in found:
            continue
        if not seeds or episode.seed in seeds:
            found.add(episode.seed)
            yield episode
        if seeds and len(found) == len(seeds):
            return


def _lost_sandboxes(rows: Metrics) -> Iterator[str]:
    """Say how many episodes of training lost their sandbox, by cause and as what that counts; nothing of none."""
    trained = [row for row in rows if row["kind"] == "train"]
    for cause, counts_as in COUNTS_AS.items():
        share = sum(rate for _, rate in rows.series(f"rollout/sandbox_lost/{cause}")) / max(1, len(trained))
        if share:
            yield f"{share:.2%} of training's episodes: {cause}, which counts as {counts_as}"


def _facts(config: RunConfig, summary: Summary, more: Mapping[str, str], rows: Metrics) -> list[tuple[str, str]]:
    installed = (found for name in PACKAGES for found in importlib.metadata.distributions(name=name))
    versions = [f"{found.name} {found.version}" for found in installed]
    wall, memory = ("wall time", f"{summary['wall_s']:.0f} s"), summary.get("peak_rss_mib")
    return [
        ("environment", config.env_id),
        ("seed", str(config.seed)),
        *more.items(),
        *(("lost sandboxes", lost) for lost in _lost_sandboxes(rows)),
        ("held out", f"split '{config.eval.split}', {summary['eval']['n']} distinct tasks"),
        wall if memory is None else ("wall time, peak memory", f"{wall[1]}, {memory:.0f} MiB"),
        ("software", ", ".join([f"agent_rl {__version__}", *versions, f"Python {platform.python_version()}"])),
    ]
