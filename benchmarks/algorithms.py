"""Every algorithm preset from the same warm start: final success, speed and stability, as BENCHMARKS.md shows them.

    python benchmarks/algorithms.py [--seeds 0 1 2] [--steps 40] [--presets grpo gspo ...] [--workers 2] [--out FOLDER]
                                   [key=value ...]

One warm start per seed (`agent-rl train steps=0`), then each preset trains from that checkpoint with the optimizer's
defaults, which were tuned for grpo. *Fall* is the largest fall of the success rate of training rollouts, averaged over
five steps, below its best so far: how unstable a run was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent_rl.config import choices
from agent_rl.runs.metrics import read_metrics

OUT = Path("runs") / "algorithms"


def main() -> int:
    """Train and print a Markdown table; return 1 if a preset did not climb on every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--presets", nargs="+", default=[name for name in choices("algorithm") if not name.endswith("-paper")]
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=OUT, help="where runs go; finished ones there are taken as they are"
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    common = ["eval.n=256", "eval.every=0", "threads=1", *options.overrides]
    with ThreadPoolExecutor(options.workers) as pool:
        starts = pool.map(lambda seed: train("warm", seed, ["steps=0", *common], options.out), options.seeds)
        warm = dict(zip(options.seeds, starts, strict=True))

        def reinforce(job: tuple[str, int]) -> Path:
            preset, seed = job
            settings = [f"algorithm={preset}", f"steps={options.steps}", f"start_from={warm[seed] / 'checkpoint'}"]
            return train(preset, seed, [*settings, *common], options.out)

        jobs = [(preset, seed) for preset in options.presets for seed in options.seeds]
        folders = dict(zip(jobs, pool.map(reinforce, jobs), strict=True))
    print("| preset | before | after, sampled | after, greedy | largest fall | RL seconds |")
    print("|---|---|---|---|---|---|")
    climbed = [report(preset, [folders[preset, seed] for seed in options.seeds]) for preset in options.presets]
    return 0 if all(climbed) else 1


def train(name: str, seed: int, settings: list[str], out: Path = OUT) -> Path:
    """Train in its own process and folder of `out`; reuse a finished run."""
    parent = out / f"{name}-{seed}"
    done = parent / "latest" / "summary.json"
    if not done.exists():
        command = [sys.executable, "-m", "agent_rl", "train", f"seed={seed}", f"runs_dir={parent}", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"finished {name}, seed {seed}", file=sys.stderr, flush=True)
    return done.parent.resolve()


def report(preset: str, folders: list[Path]) -> bool:
    """Print a preset's row, one number per seed; return whether it climbed on all of them by 10 points."""
    evals = [json.loads((f / "summary.json").read_text())["eval"] for f in folders]
    rows = [[r for r in read_metrics(f / "metrics.jsonl") if r["kind"] == "train"] for f in folders]
    seconds = [sum(float(r["perf/rollout_s"]) + float(r["perf/update_s"]) for r in run) for run in rows]
    cells = [
        *(" / ".join(f"{e[key]:.1%}" for e in evals) for key in ("before", "after", "after_greedy")),
        " / ".join(f"{fall([float(r['rollout/success']) for r in run]):.0%}" for run in rows),
        f"{statistics.median(seconds):.0f}",
    ]
    print(f"| {preset} | {' | '.join(cells)} |", flush=True)
    return all(e["after"] > e["before"] + 0.1 for e in evals)


def fall(successes: list[float], width: int = 5) -> float:
    """Return how far the moving average ever fell below its best so far."""
    means = [statistics.fmean(successes[i : i + width]) for i in range(max(1, len(successes) - width + 1))]
    return max(max(means[: i + 1]) - mean for i, mean in enumerate(means))


if __name__ == "__main__":
    sys.exit(main())
