"""Effect of stale tokens: presets trained on batches some updates old, and what saves them; see BENCHMARKS.md.

    python benchmarks/staleness.py [--seeds 0 1 2] [--steps 40] [--presets grpo ...] [--treatments own tis ...]
                                   [--stale 0 1 4] [--workers 2] [key=value ...]

One warm start per seed, as in algorithms.py, then each preset trains from that checkpoint with
`async.mode=one_step_off`, by each treatment, which is settings on top of it. *KL* is that of the policy in training
from the one that sampled (k3, in thousandths of a nat per token), *clipped* the share of tokens whose gradient the
objective cut off; both are means over steps. A finished run is taken as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from algorithms import fall, train

from agent_rl.config import choices
from agent_rl.runs.metrics import read_metrics

OUT = Path("runs") / "staleness"
TREATMENTS: dict[str, list[str]] = {
    "own": [],
    "rollout": ["algorithm.proximal=rollout"],
    "recompute": ["algorithm.proximal=recompute"],
    "tis": ["algorithm.proximal=recompute", "algorithm.weight=token-tis"],
    "icepop": ["algorithm.proximal=recompute", "algorithm.weight=icepop"],
    "mis": ["algorithm.proximal=recompute", "algorithm.rejection=sequence"],
    "mask": ["algorithm.proximal=recompute", "algorithm.rejection=token"],
    "opsm": ["algorithm.proximal=recompute", "algorithm.negative_mask={name: opsm, delta: 0.01}"],
}
"""Whose log-probabilities are old's, and what corrects by old/mu; `own` is what the preset and `auto` have."""


def main() -> int:
    """Train the missing runs and print a table; return 1 if a batch was not as old as it should have been."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--presets", nargs="+", choices=choices("algorithm"), default=["grpo"])
    parser.add_argument("--treatments", nargs="+", choices=TREATMENTS, default=list(TREATMENTS))
    parser.add_argument("--stale", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    common = ["eval.n=256", "eval.every=0", "threads=1", *options.overrides]
    chosen = [(preset, treatment) for preset in options.presets for treatment in options.treatments]

    def run(job: tuple[str, str, int, int]) -> Path:
        preset, treatment, stale, seed = job
        start = [f"steps={options.steps}", f"start_from={warm[seed] / 'checkpoint'}"]
        ahead = ["async.mode=one_step_off", f"async.max_staleness={stale}"] if stale else []
        settings = [f"algorithm={preset}", *TREATMENTS[treatment], *start, *ahead, *common]
        return train(f"{preset}-{treatment}-{stale}", seed, settings, OUT)

    with ThreadPoolExecutor(options.workers) as pool:
        starts = pool.map(lambda seed: train("warm", seed, ["steps=0", *common], OUT), options.seeds)
        warm = dict(zip(options.seeds, starts, strict=True))
        jobs = [(*pair, stale, seed) for seed in options.seeds for stale in options.stale for pair in chosen]
        folders = dict(zip(jobs, pool.map(run, jobs), strict=True))
    print("| preset | treatment | updates old | before | sampled | greedy | largest fall | KL | clipped |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = [(*pair, stale) for pair in chosen for stale in options.stale]
    aged = [report(*row, [folders[*row, seed] for seed in options.seeds]) for row in rows]
    return 0 if all(aged) else 1


def report(preset: str, treatment: str, stale: int, folders: list[Path]) -> bool:
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
    print(f"| {preset} | {treatment} | {stale} | {' | '.join(cells)} |", flush=True)
    age = f"policy_version/staleness_{stale}{'+' if stale > 3 else ''}"
    return all(row[age] == 1.0 for run in rows for row in run[stale:])


def mean(rows: list[dict[str, object]], name: str) -> float:
    """Return the mean of a metric over steps."""
    return statistics.fmean(float(str(row[name])) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
