"""The memory that runs were estimated to take, beside the most that they held.

Run `python benchmarks/memory.py [--model FOLDER]`. Each run trains two steps in a process of its own, on the CPU, with
one thread; its measured increase is the highest resident memory less that of the process when the estimate was made.
FOLDER is SmolLM2's, as `examples/smollm2.py` writes it; without it there are the rows of models made here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = ["steps=2", "eval.n=8", "eval.dev_n=8", "eval.every=0", "threads=1"]
FRESH = ["warm_start.copy_steps=2", "warm_start.clone_steps=2", "warm_start.demonstrations=64"]
WIDE = ["model.hidden=512", "model.layers=8", "model.heads=8", "model.kv_heads=8", "model.head_dim=64"]
SMOLLM2 = ["model=smollm2", "warm_start.clone_steps=2", "warm_start.demonstrations=64"]
RUNS = {
    "default, 0.7 M": FRESH,
    "default, 4,096 tokens a forward": [*FRESH, "micro_batch_tokens=4096"],
    "30 M": [*FRESH, *WIDE, "model.intermediate=2048", "rollout.groups=8"],
    "30 M, checkpointed": [*FRESH, *WIDE, "model.intermediate=2048", "rollout.groups=8", "gradient_checkpointing=true"],
}
ITS = {
    "SmolLM2, last 15 layers, bfloat16": SMOLLM2,
    "SmolLM2, all of it, float32": [*SMOLLM2, "dtype=float32", "freeze.layers=0", "freeze.embeddings=false"],
    "SmolLM2, LoRA, bfloat16": [*SMOLLM2, "freeze.layers=0", "freeze.embeddings=false", "lora.rank=16"],
}
CHILD = """
import sys
from pathlib import Path
import agent_rl as ar
from agent_rl.backends.embedded import memory, run
from agent_rl.config import parse_setting

def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 2**10

found = {}
def measured(*arguments):
    memory_found = memory.require_memory(*arguments)
    found.update(estimate=memory_found.total / 2**20, before=held("VmRSS"))
    Path("/proc/self/clear_refs").write_text("5")  # from now on the highest is this run's
    return memory_found
run.require_memory = measured
ar.train(progress=False, **dict(map(parse_setting, sys.argv[1:])))
print(found["estimate"], held("VmHWM") - found["before"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="SmolLM2's folder")
    options = parser.parse_args()
    runs = RUNS | ({name: [*of, f"start_from={options.model}"] for name, of in ITS.items()} if options.model else {})
    print("| run | estimate, MiB | measured, MiB | estimate / measured |\n|---|---|---|---|")
    for name, settings in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", CHILD, f"runs_dir={folder}", *COMMON, *settings]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        if done.returncode:
            print(f"{name}: {done.stderr[-2000:]}")
            return 1
        estimate, measured = map(float, done.stdout.split()[-2:])
        print(f"| {name} | {estimate:,.0f} | {measured:,.0f} | {estimate / measured:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
