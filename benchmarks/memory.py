"""The memory that updates were estimated to take, beside the most that they held.

Run `python benchmarks/memory.py [--model FOLDER]`. Each row is a process of its own, on the CPU, with one thread and
one slot: it makes or loads the model as a run does, and takes two updates, each of two micro-batches of random ids.
Measured is the highest resident memory less that of the process when the estimate was made. FOLDER is SmolLM2's, as
`examples/smollm2.py` writes it; without it there are the rows of models made here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = ["rollout.slots=1", "rollout.context=256", "threads=1"]
WIDE = ["model.hidden=512", "model.layers=8", "model.heads=8", "model.head_dim=64", "model.intermediate=2048"]
RUNS = {
    "0.7 M, 4,096 tokens": ["micro_batch_tokens=4096"],
    "34 M": [*WIDE, "model.kv_heads=8"],
    "34 M, checkpointed": [*WIDE, "model.kv_heads=8", "gradient_checkpointing=true"],
}
ITS = {
    "SmolLM2, LoRA, bfloat16": ["dtype=bfloat16", "lora.rank=16", "micro_batch_tokens=512"],
    "SmolLM2, last 15 layers, bfloat16": [
        "dtype=bfloat16", "freeze.layers=15", "freeze.embeddings=true", "micro_batch_tokens=512",
    ],
    "SmolLM2, all of it, float32": ["micro_batch_tokens=512"],
}  # fmt: skip
CHILD = """
import sys
from pathlib import Path
import torch
from agent_rl.backends.embedded.actor import actor_of, fine_tune
from agent_rl.backends.embedded.fine_tuning import checkpointed
from agent_rl.backends.embedded.memory import require_memory
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.settings import training_config
from agent_rl.config import parse_setting
from agent_rl.engines.embedded.model_folder import load_model
from agent_rl.rendering import train_tokenizer
from contextlib import nullcontext

def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 2**10

config = training_config("calculator-v0", **dict(map(parse_setting, sys.argv[2:])))
env = config.load_env()
found, before = require_memory(config, env), held("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # from now on the highest is what follows
if config.start_from:
    model, tokenizer = load_model(config.start_from, dtype=config.dtype)
    fine_tune(model, tokenizer, config, Path(sys.argv[1]))
else:
    tokenizer = train_tokenizer(["What is 12 + 3? It is 15."], 432)
    model = make_model(config.model, config.vocab_size, 0)
trainer = Trainer(env, actor_of(env, config, model, tokenizer), config)
trainer.actor.engine.release_weights()
ids = torch.randint(10, 400, (config.forward_tokens // 128, 128))
for _ in range(2):  # the second update has the optimizer's state beside it
    for _ in range(2):
        with checkpointed(model) if config.gradient_checkpointing else nullcontext():
            scores = score_tokens(model, ids, precision=config.precision)
        trainer.optimizer.backward(scores.logprobs.sum())
    trainer.optimizer.step(1.0)
print(found.total / 2**20, held("VmHWM") - before)
"""


def measure(settings: list[str]) -> tuple[float, float]:
    """Return the estimate of the settings and what two updates held at most, in MiB.

    Raises:
        RuntimeError: if the process fails, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, folder, *COMMON, *settings]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    estimate, measured = map(float, done.stdout.split()[-2:])
    return estimate, measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="SmolLM2's folder")
    options = parser.parse_args()
    runs = RUNS | ({name: [*of, f"start_from={options.model}"] for name, of in ITS.items()} if options.model else {})
    print("| update | estimate, MiB | measured, MiB | estimate / measured |\n|---|---|---|---|", flush=True)
    for name, settings in runs.items():
        estimate, measured = measure(settings)
        print(f"| {name} | {estimate:,.0f} | {measured:,.0f} | {estimate / measured:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
