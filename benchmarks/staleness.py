"""Effect of stale tokens: presets trained on batches some updates old, as BENCHMARKS.md shows it.

    python benchmarks/staleness.py [--seeds 0 1 2] [--steps 40] [--presets grpo decoupled_ppo] [--stale 0 1 4]
                                   [--workers 2] [key=value ...]

One warm start per seed, as in algorithms.py, then each preset trains from that checkpoint with
`async.mode=one_step_off`. *KL* is that of the policy in training from the one that sampled (k3, in thousandths of a nat
per token), *clipped* the share of tokens whose gradient the objective cut off; both are means over steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from algorithms import fall, reinforce, train

from agent_rl.runs.metrics import read_metrics


def main() -> int:
    """Train and print a Markdown table; return 1 if a batch was not as old as it should have been."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--presets", nargs="+", default=["grpo", "decoupled_ppo"])
    parser.add_argument("--stale", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    common = ["eval.n=256", "eval.every=0", "threads=1", *options.overrides]

    def run(job: tuple[str, int, int]) -> Path:
        preset, stale, seed = job
        ahead = ["async.mode=one_step_off", f"async.max_staleness={stale}"] if stale else []
        return reinforce(preset, seed, warm[seed], options.steps, [*common, *ahead], name=f"{preset}-stale{stale}")

    with ThreadPoolExecutor(options.workers) as pool:
        starts = pool.map(lambda seed: train("warm", seed, ["steps=0", *common]), options.seeds)
        warm = dict(zip(options.seeds, starts, strict=True))
        jobs = [(p, stale, seed) for p in options.presets for stale in options.stale for seed in options.seeds]
        folders = dict(zip(jobs, pool.map(run, jobs), strict=True))
    print("| preset | updates old | before | after, sampled | after, greedy | largest fall | KL | clipped |")
    print("|---|---|---|---|---|---|---|---|")
    settings = [(preset, stale) for preset in options.presets for stale in options.stale]
    aged = [report(p, stale, [folders[p, stale, seed] for seed in options.seeds]) for p, stale in settings]
    return 0 if all(aged) else 1


def report(preset: str, stale: int, folders: list[Path]) -> bool:
    """Print a row, one number per seed; return whether its batches were as old as they should have been."""
    evals = [json.loads((f / "summary.json").read_text())["eval"] for f in folders]
    rows = [[r for r in read_metrics(f / "metrics.jsonl") if r["kind"] == "train"] for f in folders]
    trained = [[r for r in run if r["train/samples"]] for run in rows]
    cells = [
        *(" / ".join(f"{e[key]:.1%}" for e in evals) for key in ("before", "after", "after_greedy")),
        " / ".join(f"{fall([float(r['rollout/success']) for r in run]):.0%}" for run in rows),
        " / ".join(f"{1000 * mean(run, 'train/rollout_kl'):.1f}" for run in trained),
        " / ".join(f"{mean(run, 'train/clip_fraction'):.1%}" for run in trained),
    ]
    print(f"| {preset} | {stale} | {' | '.join(cells)} |", flush=True)
    name = f"policy_version/staleness_{stale}{'+' if stale > 3 else ''}"
    return all(row[name] == 1.0 for run in rows for row in run[stale:])


def mean(rows: list[dict[str, object]], name: str) -> float:
    """Return the mean of a metric over steps."""
    return statistics.fmean(float(str(row[name])) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
