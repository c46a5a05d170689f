"""Learning curves of several seeds, as BENCHMARKS.md shows them: a table on the terminal and a figure.

    python benchmarks/learning.py run calculator-v0 [key=value ...] --seeds 0 1 2 3 4
    python benchmarks/learning.py collect RUN [RUN ...] --figure benchmarks/learning.svg

`run` trains one seed after the other, from the command line, as a user would, and takes a finished run as it is;
`collect` reads finished runs.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from algorithms import train
from omegaconf import OmegaConf

from agent_rl.runs.metrics import read_metrics
from agent_rl.runs.report import Summary

OUT = Path("runs") / "learning"
BARS = {"after": 0.90, "after_greedy": 0.97}
GAIN = 0.40
CONTROL = ", shuffled rewards"


def main() -> int:
    """Run or collect; return 1 if a run missed the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("env")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    run.add_argument("overrides", nargs="*")
    collect = commands.add_parser("collect")
    collect.add_argument("runs", nargs="+", type=Path)
    for sub in (run, collect):
        sub.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        runs = [run_of(arguments.env, seed, arguments.overrides) for seed in arguments.seeds]
    else:
        runs = arguments.runs
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    passed = [report(summary, variant(run)) for run, summary in zip(runs, summaries, strict=True)]
    if arguments.figure:
        draw(runs, summaries, arguments.figure)
    return 0 if all(passed) else 1


def run_of(env: str, seed: int, overrides: list[str]) -> Path:
    """Train one seed; say how busy the machine was."""
    print(f"load {os.getloadavg()[0]:.1f}: {env}, seed {seed}", file=sys.stderr, flush=True)
    name = "-".join([env, *overrides]).replace("/", "-")
    return train(name, seed, [f"env={env}", *overrides], OUT)


def variant(run: Path) -> str:
    """Say what sets a run apart besides its seed."""
    config = OmegaConf.load(run / "config.yaml")
    return ", LoRA" * bool(config.lora) + CONTROL * bool(config.shuffle_rewards)


def report(summary: Summary, kind: str) -> bool:
    """Print a run as a row of a Markdown table; return whether it reached the bar, a control's being not to climb."""
    results = summary["eval"]
    before, low, after = results["before"], results["before_low_temperature"], results["after"]
    climbed = all(results[name] >= bar for name, bar in BARS.items()) and after - before >= GAIN
    ok = after < before + 0.1 if CONTROL in kind else climbed
    env = summary["env"] + kind
    print(
        f"| {env} | {summary['seed']} | {before:.1%} | {low:.1%} | {results['before_greedy']:.1%} "
        f"| {after:.1%} | {results['after_greedy']:.1%} | {summary['wall_s']:.0f} | {summary['peak_rss_mib']:.0f} "
        f"| {'yes' if ok else 'NO'} |"
    )
    return ok


def draw(runs: list[Path], summaries: list[Summary], figure: Path) -> None:
    """Draw the held-out curves, one panel an environment."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "agent_rl"
    envs = sorted({s["env"] for s in summaries})
    _, axes = plt.subplots(1, len(envs), figsize=(5.5 * len(envs), 3.6), sharey=True, squeeze=False)
    for run, summary in zip(runs, summaries, strict=True):
        rows = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "eval" and r["sampling"] == "sampled"]
        points = sorted({int(str(r["step"])): float(str(r["success"])) for r in rows}.items())
        panel = axes[0][envs.index(summary["env"])]
        panel.plot(
            *zip(*points, strict=True),
            marker=".",
            label=f"seed {summary['seed']}{variant(run)}",
        )
        panel.set_title(f"{summary['env']}: held-out success, sampled at T=1")
        panel.set_xlabel("step")
        panel.axhline(BARS["after"], color="grey", lw=0.5, ls=":")
    for panel in axes[0]:
        panel.set_ylim(0, 1.02)
        panel.legend()
    plt.tight_layout()
    plt.savefig(figure, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
