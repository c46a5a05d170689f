"""Environments unlike the built-in ones, learned by the defaults of `agent-rl train`, as BENCHMARKS.md shows it.

    python benchmarks/unlike.py [key=value ...] [--envs lock hops belt compare stock] [--seeds 0 1 2]
                                [--figure benchmarks/unlike.svg]

Each is a file in benchmarks/unlike/, beside the built-in ones as they are no examples: what they ask for is hard for a
tiny model, and their demonstrations and short cuts are made to mislead it. *Short cut* is what the best policy earns
that leaves out what has to be learned. A finished run is taken as it is; --dry-run trains none, and prints
what scripts earn and the runs that there are. `--envs watch` is one more, which the defaults do not learn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from algorithms import train

from agent_rl.gym.registry import load_once, spec
from agent_rl.policy import Scripted, demonstrator, oracle
from agent_rl.rollout import Job, run_jobs, summarise
from agent_rl.rollout.evaluation import Rate
from agent_rl.runs.metrics import Row, read_metrics
from agent_rl.seeds import Stream, rng

OUT = Path("runs") / "unlike"
FILES = Path(__file__).parent / "unlike"
STEPS: Mapping[str, int] = {"lock": 900, "hops": 900, "belt": 300, "compare": 2000, "stock": 500, "watch": 600}
"""The environments, and for how long each is trained."""
TOO_HARD = {"watch"}
"""Which of them the defaults do not learn."""
COMMON = ("threads=1", "eval.n=256", "eval.every=50")
BAR, EARLY, SMOOTH = 0.95, 20, 5


def main() -> int:
    """Train the missing runs and print a Markdown table; return 1 if a run missed the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=STEPS, default=[name for name in STEPS if name not in TOO_HARD])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print("| environment | oracle | demonstrations | short cut |\n|---|---|---|---|")
    short_cuts = {name: floors(name) for name in options.envs}
    runs = {}
    for seed in options.seeds:  # a seed of all environments first
        for name in options.envs:
            if not options.dry_run:
                learn(name, seed, options.overrides)
            if (OUT / f"{name}-{seed}" / "latest" / "summary.json").exists():
                runs[name, seed] = (OUT / f"{name}-{seed}" / "latest").resolve()
    print(
        "\n| environment | seed | before RL, sampled | greedy | step 20 | **after**, sampled | greedy "
        "| steps to 95% | seconds | named | bar |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    passed = [report(*key, folder) for key, folder in sorted(runs.items())]
    if options.figure:
        draw(runs, short_cuts, options.figure)
    return 0 if passed and all(passed) else 1


def learn(name: str, seed: int, overrides: Sequence[str] = ()) -> None:
    """Train on an environment as a user would; say how busy the machine was."""
    file = str(FILES / f"{name}.py")
    print(f"load {os.getloadavg()[0]:.1f}: {name}, seed {seed}", file=sys.stderr, flush=True)
    settings = ["--import", file, f"env=unlike/{name}-v0", f"steps={STEPS[name]}", *COMMON]
    train(name, seed, [*settings, *overrides], OUT)


def floors(name: str, n: int = 400) -> Rate:
    """Print what scripts earn on an environment's tasks; return what its short cut does on held-out ones."""
    load_once(FILES / f"{name}.py")
    env = spec(f"unlike/{name}-v0")
    policy = Scripted(lambda env, seed: env.short_cut(rng(Stream.BASELINE, seed)))  # type: ignore[attr-defined]

    def play(split: str, policy: Scripted) -> Rate:
        jobs = [Job(env, env.tasks.get(split, i), i) for i in range(n)]
        return summarise(asyncio.run(run_jobs(jobs, policy))).success

    rates = (play("eval", oracle()), play("train", demonstrator()), play("eval", policy))
    shown = (f"{rate.share} ({rate.interval[0]:.1%} to {rate.interval[1]:.1%})" for rate in rates)
    print(f"| {name} | {' | '.join(shown)} |", flush=True)
    return rates[-1]


def report(name: str, seed: int, folder: Path) -> bool:
    """Print a run as a row; return whether it reached the bar, and not before step 20."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = list(read_metrics(folder / "metrics.jsonl"))
    curve, found = smooth(rows), summary["eval"]
    n = next(int(str(row["n"])) for row in rows if row["kind"] == "eval" and row["split"] == "eval")
    after = Rate(round(found["after"] * n), n)
    reached = next((step for step, success in enumerate(curve, 1) if success >= BAR), None)
    causes = [(key, row["step"]) for row in rows for key in row if key.startswith("diagnosis/")]
    named = [f"{key.removeprefix('diagnosis/')} at {step}" for key, step in dict(reversed(causes)).items()]
    ok = after.value >= BAR and (reached is None or reached > EARLY)
    low, high = after.interval
    print(
        f"| {name} | {seed} | {found['before']:.1%} | {found['before_greedy']:.1%} "
        f"| {curve[min(EARLY, len(curve)) - 1]:.1%} | {after.share} ({low:.1%} to {high:.1%}) "
        f"| {found['after_greedy']:.1%} | {reached or 'never'} of {len(curve)} | {summary['wall_s']:.0f} "
        f"| {', '.join(named) or 'nothing'} | {'yes' if ok else 'NO'} |",
        flush=True,
    )
    return ok


def smooth(rows: Sequence[Row]) -> list[float]:
    """Return the success of training rollouts, each the mean of the last five steps."""
    values = [float(str(row["rollout/success"])) for row in rows if row["kind"] == "train"]
    parts = [values[max(0, end - SMOOTH) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def draw(runs: Mapping[tuple[str, int], Path], short_cuts: Mapping[str, Rate], figure: Path) -> None:
    """Draw a panel an environment: success of training rollouts, and held-out success with its 95 % intervals."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "agent_rl"
    _, axes = plt.subplots(1, len(short_cuts), figsize=(3.6 * len(short_cuts), 3.4), sharey=True, squeeze=False)
    for panel, (name, earned) in zip(axes[0], short_cuts.items(), strict=True):
        for (env, seed), folder in runs.items():
            if env == name:
                rows = list(read_metrics(folder / "metrics.jsonl"))
                panel.plot(smooth(rows), color=f"C{seed}", lw=1, label=f"seed {seed}")
                for row in rows:
                    if row["kind"] == "eval" and row["sampling"] == "sampled":
                        n, value = int(str(row["n"])), float(str(row["success"]))
                        low, high = Rate(round(value * n), n).interval
                        spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
                        panel.errorbar(int(str(row["step"])), value, spread, fmt=".", color=f"C{seed}", lw=0.8)
        panel.axhline(earned.value, color="grey", lw=0.7, ls="--", label="short cut")
        panel.axhline(BAR, color="grey", lw=0.5, ls=":")
        panel.set(title=name, xlabel="MaxRL step", ylim=(0, 1.02))
        panel.legend(frameon=False, fontsize="small")
    axes[0][0].set_ylabel("success; dots: held out")
    plt.tight_layout()
    plt.savefig(figure, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
