"""What a run leaves behind to read: summary.json and report.html, both made from the run's own files."""

from __future__ import annotations

import json
import platform
from itertools import islice
from pathlib import Path
from typing import TypedDict

import torch

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.core.episode import Episode, Origin
from agent_rl.errors import StoreError
from agent_rl.rollout import Rate
from agent_rl.runs.metrics import Row, read_metrics
from agent_rl.store.episodes import read_episodes
from agent_rl.version import __version__
from agent_rl.view.curve import learning_curve_svg
from agent_rl.view.html import Comparison, Estimate, write_report

SHOWN = 6
"""How many tasks the report shows before and after."""


class Evaluated(TypedDict):
    """Success rates on the reported split, sampled at the training temperature unless the name says otherwise."""

    before: float
    after: float
    n: int
    before_greedy: float
    after_greedy: float
    before_low_temperature: float
    after_low_temperature: float


class Summary(TypedDict):
    """summary.json."""

    env: str
    seed: int
    steps: int
    eval: Evaluated
    intervals: dict[str, tuple[float, float]]
    """95 % Wilson intervals, by the names in `eval`."""
    demonstrations: dict[str, int]
    wall_s: float
    peak_rss_mib: float


def summarise_run(folder: Path, config: TrainConfig, *, wall_s: float, peak_rss_mib: float) -> Summary:
    """Write summary.json from metrics.jsonl."""
    rows = read_metrics(folder / "metrics.jsonl")
    rates = {name: (_rate(rows, config, 0, name), _rate(rows, config, config.steps, name)) for name in _NAMES}
    flat = {
        f"{when}{suffix}": rates[name][side]
        for name, suffix in _NAMES.items()
        for side, when in enumerate(("before", "after"))
    }
    shown = next((row for row in rows if row["kind"] == "demonstrations"), {})
    summary = Summary(
        env=config.env,
        seed=config.seed,
        steps=config.steps,
        eval=Evaluated(n=flat["after"].n, **{key: rate.value for key, rate in flat.items()}),  # type: ignore[typeddict-item]
        intervals={key: rate.interval for key, rate in flat.items()},
        demonstrations={key: int(str(shown.get(key, 0))) for key in ("n", "failed")},
        wall_s=round(wall_s, 1),
        peak_rss_mib=round(peak_rss_mib, 1),
    )
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


_NAMES = {"sampled": "", "greedy": "_greedy", "low-temperature": "_low_temperature"}


def _rate(rows: list[Row], config: TrainConfig, step: int, sampling: str) -> Rate:
    wanted = {"kind": "eval", "step": step, "split": config.eval.split, "sampling": sampling}
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return Rate(int(str(row["successes"])), int(str(row["n"])))
    raise StoreError(f"metrics.jsonl has no evaluation {wanted}")


def write_run_report(folder: Path, config: TrainConfig, summary: Summary) -> Path:
    """Write report.html: the learning curve, the evaluations, and a few tasks before and after."""
    rows = read_metrics(folder / "metrics.jsonl")
    comparisons = [
        Comparison(_LABELS[name], *(_estimate(_rate(rows, config, step, name)) for step in (0, config.steps)))
        for name in _NAMES
    ]
    results = summary["eval"]
    before, after = (_shown_episodes(folder, config, step) for step in (0, config.steps))
    return write_report(
        folder / "report.html",
        title=f"{config.env}, {config.algorithm.name}, seed {config.seed}",
        summary={
            "before": f"{results['before']:.1%}",
            "after": f"{results['after']:.1%}",
            "greedy after": f"{results['after_greedy']:.1%}",
            "seconds": f"{summary['wall_s']:.0f}",
        },
        curve_svg=_curve(rows, config),
        facts=_facts(config, summary),
        comparisons=comparisons,
        before=before,
        after=after,
    )


_LABELS = {
    "sampled": "sampled at the training temperature",
    "greedy": "greedy",
    "low-temperature": "sampled at a low temperature",
}


def _estimate(rate: Rate) -> Estimate:
    return Estimate(rate.value, *rate.interval, rate.n)


def _curve(rows: list[Row], config: TrainConfig) -> str:
    # a step on stored episodes has no rollouts
    train = [(int(str(r["step"])), float(str(r["rollout/success"]))) for r in rows if "rollout/success" in r]
    evals = {}  # the reported split before and after, the dev split in between
    for row in rows:
        if row["kind"] == "eval" and row["sampling"] == "sampled":
            rate = Rate(int(str(row["successes"])), int(str(row["n"])))
            evals[int(str(row["step"]))] = (rate.value, *rate.interval)
    return learning_curve_svg(train, [(step, *point) for step, point in sorted(evals.items())])


def _shown_episodes(folder: Path, config: TrainConfig, step: int) -> list[Episode]:
    """Return the first episodes of an evaluation; those at the training temperature are stored first."""
    wanted = Origin("eval", config.eval.split, step, greedy=config.rollout.temperature == 0)
    return list(islice((e for e in read_episodes(folder / "episodes.jsonl") if e.origin == wanted), SHOWN))


def _facts(config: TrainConfig, summary: Summary) -> list[tuple[str, str]]:
    shown = summary["demonstrations"]
    return [
        ("environment", config.env),
        ("seed", str(config.seed)),
        ("demonstrations", f"{shown['n']}, of which {shown['failed']} fail"),
        ("training", config.describe_training()),
        ("held out", f"split '{config.eval.split}', {summary['eval']['n']} distinct tasks"),
        ("control", "rewards are shuffled" if config.shuffle_rewards else "none"),
        ("wall time, peak memory", f"{summary['wall_s']:.0f} s, {summary['peak_rss_mib']:.0f} MiB"),
        ("software", f"agent_rl {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
    ]
