"""Sampling and updates by device and size of model, with random weights and 64 sequences at a time.

Run `python benchmarks/device.py [--devices cpu cuda] [--threads 1 16] [--sizes default]`. Sampling: a prompt of 100
tokens, then 100 tokens each at temperature 1, after a first round that is not measured. Update: forward, backward and
AdamW over 64 rows of 256 tokens in micro-batches of 4096, the median of five after one. The larger models sample 25
tokens and train on eight rows, once, on a CPU with the most threads only. On a GPU a step of a dense model's sampling
is a recorded graph; *without graphs* the same kernels are launched one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.optimizer import Optimizer, OptimizerConfig
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.device import device_of
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.forward import Forward, FusedForward
from agent_rl.engines.embedded.module_forward import make_forward
from agent_rl.moe.routes import experts_of

SIZES = {
    "default": {},
    "MoE": {"architecture": "qwen3_moe"},
    "100M": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate": 3072},
    "107M": {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536},
    "500M": {"hidden": 1280, "layers": 20, "heads": 20, "kv_heads": 4, "head_dim": 64, "intermediate": 5376},
}
VOCAB, SEQUENCES, PROMPT, SAMPLED, ROWS, WIDTH, MICRO_BATCH = 576, 64, 100, 100, 64, 256, 4096


def sample(engine: Engine, count: int) -> None:
    """Sample `count` tokens of every sequence."""
    random = np.random.default_rng(0)

    async def one(seed: int) -> None:
        sequence = engine.open(seed)
        ids = random.integers(0, VOCAB, PROMPT).tolist()
        await sequence.sample(ids, SamplingParams(max_tokens=count), frozenset())
        sequence.close()

    async def every_one() -> None:
        await asyncio.gather(*map(one, range(SEQUENCES)))

    asyncio.run(every_one())


def rate(model: PreTrainedModel, count: int, forward: Callable[..., Forward]) -> float:
    """Return tokens sampled per second."""
    engine = Engine(model, slots=SEQUENCES, max_len=256, forward=forward)
    sample(engine, 8)
    return SEQUENCES * count / seconds(partial(sample, engine, count))


def update(model: PreTrainedModel, optimizer: Optimizer, precision: PrecisionConfig, rows: int) -> None:
    """Take one step of gradient descent over random tokens."""
    ids = torch.randint(0, VOCAB, (rows, WIDTH))
    for part in ids.split(MICRO_BATCH // WIDTH):
        scores = score_tokens(model, part.to(model.device), precision=precision)
        optimizer.backward(-scores.logprobs.mean() * len(part) / rows)
    optimizer.step(1.0)


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a run; `update` and `sample` end by reading a number from the device."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(size: str, device: torch.device, autocasts: list[str]) -> list[str]:
    """Return the table's columns by autocast: tokens per second sampled and trained, and the GPU's peak memory."""
    slow = device.type == "cpu" and size.endswith("M")
    model = make_model(ModelConfig(**SIZES[size]), VOCAB, seed=0).eval().to(device)
    count, rows = (SAMPLED // 4, ROWS // 8) if slow else (SAMPLED, ROWS)
    sampled = [f"{rate(model, count, make_forward):,.0f}", ""]
    if device.type == "cuda" and not experts_of(model):
        sampled[1] = f"{rate(model, count, FusedForward):,.0f}"
    columns = []
    for autocast in autocasts:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        precision = PrecisionConfig.model_validate({"autocast": autocast})
        work = partial(update, model, Optimizer(model, OptimizerConfig()), precision, rows)
        if not slow:
            work()
        trained = rows * WIDTH / statistics.median(seconds(work) for _ in range(1 if slow else 5))
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if device.type == "cuda" else ""
        million = sum(p.numel() for p in model.parameters()) / 1e6
        columns.append(f"{size}, {million:.1f} M | {autocast} | {' | '.join(sampled)} | {trained:,.0f} | {peak}")
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{gpu}; {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.2f}; torch {torch.__version__}\n")
    print("| on | model | autocast | sampled tokens/s | without graphs | trained tokens/s | peak memory |")
    print("|---|---|---|---|---|---|---|")
    most = max(options.threads)
    for size in options.sizes:
        for name in options.devices:
            every = options.threads if name == "cpu" and not size.endswith("M") else [most]
            for threads in every:
                torch.set_num_threads(threads)
                where = f"CPU, {threads} threads" if name == "cpu" else name
                autocasts = ["none"] if name == "cpu" else ["none", "bfloat16"]
                for columns in measure(size, device_of(name), autocasts):
                    print(f"| {where} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
