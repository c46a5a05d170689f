"""Cost of mini-batches: `python benchmarks/mini_batches.py` times the updates of a step by how many there are.

The default model (0.7 M parameters) learns from one batch of groups of eight multi-turn episodes, whole and dealt to
mini-batches, in turns; numbers are CPU time of this process, the least of the repetitions.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from algorithm_cost import VOCAB, episodes
from sweep import updating_trainer

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import load_config
from agent_rl.core.episode import group_episodes

TOKENS, COUNTS, REPETITIONS, BAR = 30_000, (1, 3, 6), 3, 1.15


def trainer(minibatches: int) -> Trainer:
    """Return what updates, with a model of its own."""
    config = load_config("backend/embedded", TrainConfig, ["algorithm=grpo", f"updates.minibatches={minibatches}"])
    return updating_trainer(config, make_model(config.model, VOCAB, seed=0))


def main() -> int:
    """Print the times; return 1 if mini-batches cost more than the bar."""
    torch.set_num_threads(1)
    found = episodes(TOKENS, np.random.default_rng(0))
    trainers, best = {n: trainer(n) for n in COUNTS}, dict.fromkeys(COUNTS, float("inf"))
    x = trainers[1].algorithm.experience(group_episodes(found))
    for _ in range(REPETITIONS):
        for n, each in trainers.items():
            start = time.process_time()
            taken = each.update(x)["train/updates"]
            best[n] = min(best[n], time.process_time() - start)
            if taken != n:
                raise SystemExit(f"took {taken:g} updates, not {n}")
    print(f"{int(x.rows.lengths.sum()):,} tokens in {len(x.rows)} rows; load {os.getloadavg()[0]:.1f}")
    for n, seconds in best.items():
        print(f"{n} updates: {seconds:.2f} s of CPU time, {seconds / best[1]:.3f} x one")
    return int(max(best.values()) > BAR * best[1])


if __name__ == "__main__":
    raise SystemExit(main())
