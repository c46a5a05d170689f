"""A training step beside TRL's GRPOTrainer on the same work: python benchmarks/trl.py [--checkpoint DIR] [--model DIR].

Both sides train the same checkpoint on the same tasks of calculator-v0 with the same tokenizer and chat template, the
same number of episodes and of samples per task, GRPO with one update (clip 0.2 / 0.28, mean over all tokens, no KL),
AdamW with the same numbers, a constant learning rate, float32, one thread. A micro-batch has 1,024 tokens at most, our
default on a CPU, and 8 rows on TRL's side, its default; TRL's gradient checkpointing is off, which is its fastest. Each
side is a process of its own (`trl_steps.py`); the two take turns, `--rounds` times, each with a seed of its own. A tool
of 20 ms is a plain function that sleeps. A step is everything from one update to the next but evaluation and files:
TRL's from `on_step_end` to `on_step_end`, ours a call of `Trainer.train_step`; the first is left out. Its seconds are
those of the clock less those that the main thread waited for a core, by /proc/self/schedstat: what it takes on a
machine with nothing else to do. Memory is the most that the process ever held, imports included.

Before that, TRL's loss and optimizer learn from the batches of a run of ours: gradients, losses and norms side by side,
at a learning rate of 2e-3, which is too high for either (BENCHMARKS.md, "Training steps").

With `--device cuda` both sides are on a GPU, the pretrained model with 16 groups of 8, too; memory is what torch held
of the GPU at most. `--rows` are the rows of TRL's micro-batch; ours is 4,096 tokens there.

Without `--checkpoint` a tiny model is warm-started first, in about two minutes; `--groups` gives it more tasks a step.
`--model` adds a pretrained one, such as SmolLM2, with three examples in its prompt, for two steps of two tasks, of
`--samples` episodes each on a CPU, with instant and with slow tools. Runs in .venv-verl, where TRL 1.16 is. Exits 1
when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trl_steps import EXAMPLES, Measured, Work

BARS = {"instant": 2.5, "20 ms": 5.0, "memory": 2.0, "gradients": 1e-4}
"""How many times as fast as TRL with instant tools and with slow ones, how many times less memory, and how far apart
the gradients of one batch may be, as a share of their norm."""
STEPS = Path(__file__).with_name("trl_steps.py")


def child(name: str, *arguments: object) -> Any:
    """Call a function of `trl_steps.py` in a process of its own; -P, or it would import this file as `trl`."""
    command = [sys.executable, "-P", str(STEPS), name, json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, work: Work, rounds: int, bar: float) -> bool:
    """Print a row of the table for each run; return whether ours is `bar` times as fast in half the memory.

    Of each side the fastest run counts, and the one that held most.
    """
    found: dict[str, list[Measured]] = {"TRL": [], "ours": []}
    for seed in range(rounds):
        for side, function in (("TRL", "theirs"), ("ours", "ours")):
            m = Measured(**child(function, asdict(replace(work, seed=seed))))
            found[side].append(m)
            numbers = f"{m.seconds:.2f} | {m.cpu:.2f} | {m.wall:.1f} | {m.tokens:.0f}"
            curve = " ".join(f"{reward:.2f}" for reward in m.rewards)
            print(
                f"| {name} | {side} | {seed} | {numbers} | {m.peak_mib:.0f} | {m.start_mib:.0f} | {curve} |", flush=True
            )
    seconds, cpu = ([min(getattr(m, what) for m in runs) for runs in found.values()] for what in ("seconds", "cpu"))
    peak, step = ([max(of(m) for m in runs) for runs in found.values()] for of in (lambda m: m.peak_mib, held_by_step))
    ratio, memory = seconds[0] / seconds[1], peak[0] / peak[1]
    passed = ratio >= bar and memory >= BARS["memory"]
    print(
        f"  {'PASS' if passed else 'FAIL'}  {name}: {ratio:.2f} x as fast (bar {bar}), CPU {cpu[0] / cpu[1]:.2f} x; "
        f"memory 1/{memory:.2f} (bar 1/{BARS['memory']:g}), above the start 1/{step[0] / step[1]:.2f}; "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return passed


def held_by_step(m: Measured) -> float:
    """Return the MiB that steps added to what was held before the first."""
    return m.peak_mib - m.start_mib


def compare_updates(work: Work) -> bool:
    """Print what both updates made of the same batches; return whether their gradients of the first one are equal."""
    print("| reward | loss, ours | TRL's | norm, ours | TRL's | gradients apart by |")
    found = child("same", asdict(work))
    for reward, *numbers, apart in found:
        print(f"| {reward:.2f} | {' | '.join(f'{n:.4f}' for n in numbers)} | {apart:.1e} |", flush=True)
    passed = found[0][-1] < BARS["gradients"]
    print(
        f"  {'PASS' if passed else 'FAIL'}  the same gradient: apart by {found[0][-1]:.1e} (bar {BARS['gradients']:g})"
    )
    return passed


def main() -> int:
    """Compare; return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a warm-started tiny model; without it one is made")
    parser.add_argument("--model", help="a folder with a pretrained model, such as SmolLM2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch of TRL's")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16, help="tasks a step of the tiny model, of eight episodes each")
    parser.add_argument("--samples", type=int, default=8, help="episodes of a task of the pretrained model, on a CPU")
    parser.add_argument("--only", choices=["same", "instant", "20 ms", "model"], help="leave the others out")
    options = parser.parse_args()
    passed = []
    with tempfile.TemporaryDirectory() as folder:
        works = {}
        if options.only != "model":
            checkpoint = options.checkpoint or f"{folder}/tiny"
            if not options.checkpoint:
                child("warm_started", checkpoint)
            tiny = Work(
                checkpoint, options.steps, groups=options.groups, samples=8, delay_ms=0, rows=options.rows,
                context=256, lr=1e-3, device=options.device,
            )  # fmt: skip
            works = {"instant": tiny, "20 ms": replace(tiny, delay_ms=20, steps=4)}
            if options.only in (None, "same"):
                passed.append(compare_updates(replace(tiny, lr=2e-3, steps=5)))
        if options.model:
            child("pretrained", f"{folder}/model", options.model)
            on_cpu, on_gpu = (2, 2, options.samples, 4), (3, 16, 8, options.rows)
            steps, groups, samples, rows = on_cpu if options.device == "cpu" else on_gpu
            large = Work(
                f"{folder}/model", steps, groups, samples, delay_ms=0, rows=rows, context=512, lr=1e-5,
                examples=EXAMPLES, device=options.device,
            )  # fmt: skip
            works |= {"model, instant": large, "model, 20 ms": replace(large, delay_ms=20)}
        print(
            "| work | side | seed | seconds a step | CPU | with waiting | tokens | peak MiB | at the start | rewards |"
        )
        for name, work in works.items():
            if options.only is None or options.only in name:
                rounds = 1 if "model" in name else options.rounds
                passed.append(compare(name, work, rounds, BARS[name.removeprefix("model, ")]))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
