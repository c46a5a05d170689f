"""Cost of the verl driver's own part of a step, by mini-batches: `.venv-verl/bin/python benchmarks/verl_driver.py`.

From verl's rows, as its queue hands them out, to what every row's loss reads: tokens checked, weighed, counted by
mini-batch, dealt to ranks; for `m2po`, whose objective compares all of an update, also prepared before each. Without
Ray, the queue and the workers. Beside it, forward and backward of the default model (0.7 M parameters) on the same
tokens, extrapolated from every 16th micro-batch: a larger model makes the driver's share smaller. CPU time of this
process, the least of the repetitions, which take turns.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from algorithm_cost import BAR, EVERY, REPETITIONS, SAMPLES, episodes, training_step
from mini_batches import BAR as BAR_OF_UPDATES
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from agent_rl.algorithms import Algorithm, Experience
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.verl.driver.exchange import compute_weights, prepare
from agent_rl.backends.verl.driver.mini_batches import Cut
from agent_rl.backends.verl.driver.received import ReceivedBatch
from agent_rl.config import load_config
from agent_rl.core.episode import group_episodes

TOKENS, COUNTS, RANKS = 100_000, (1, 4, 16), 8
PRESETS = ("grpo", "icepop", "m2po")


def nested(parts: list[Tensor]) -> Tensor:
    """Return rows as verl's queue hands them out."""
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


class Batch:
    """A batch as it comes back from verl's workers, and the driver's work on it."""

    def __init__(self) -> None:
        made = episodes(TOKENS, np.random.default_rng(0))
        self.received = ReceivedBatch(made, [(number, 0) for number in range(len(made))])
        self.rows = rows = Experience.of(group_episodes(made)).rows
        lengths = rows.lengths.tolist()
        ids, masks, mu = (x.split(lengths) for x in (rows.token_ids, rows.loss_mask, rows.rollout_logprobs))
        firsts = [int(mask.int().argmax()) for mask in masks]

        def responses(of_rows: tuple[Tensor, ...]) -> Tensor:
            return nested([row[first:] for row, first in zip(of_rows, firsts, strict=True)])

        self.data = TensorDict(
            {
                "prompts": nested([row[:first] for row, first in zip(ids, firsts, strict=True)]),
                "responses": responses(ids),
                "response_mask": responses(tuple(mask.int() for mask in masks)),
                "old_log_probs": responses(tuple(row - 0.01 for row in mu)),
            },
            len(made),
        )
        self.keys = [f"{number // SAMPLES}_{number % SAMPLES}_0" for number in range(len(made))]
        self.tags = [{"seq_len": n, "is_padding": False} for n in lengths]

    def step(self, algorithm: Algorithm, minibatches: int) -> float:
        """Do the driver's work on a step of so many updates; return its CPU time in seconds."""
        theta = self.rows.rollout_logprobs + 0.01
        start = time.process_time()
        numbers: list[int] = []
        if minibatches > 1:
            cut = Cut.of(self.keys, UpdatesConfig(minibatches=minibatches), RANKS, 0, 0)
            numbers = cut.numbers(self.keys)
            cut.order(KVBatchMeta(keys=[*self.keys], tags=[*self.tags], partition_id="train"), RANKS)
        weighed = compute_weights(algorithm, self.received, self.data, 0, numbers)
        if len(weighed.mini_batches) != minibatches:
            raise SystemExit(f"{len(weighed.mini_batches)} updates, not {minibatches}")
        for rows in weighed.mini_batches:
            if algorithm.prepares(weighed.batch.select(weighed.rows_with_gradient(rows))):
                prepare(algorithm, weighed, theta, rows)
        return time.process_time() - start


def main() -> int:
    """Print the times; return 1 if the driver takes more than its share, or mini-batches more than theirs."""
    torch.set_num_threads(1)
    batch, config = Batch(), load_config("backend/embedded", TrainConfig, [])
    tokens, groups = int(batch.rows.lengths.sum()), len(batch.keys) // SAMPLES
    print(f"{tokens:,} tokens in {groups} groups of {SAMPLES} rows, {RANKS} ranks; load {os.getloadavg()[0]:.1f}")
    step = training_step(batch.rows, config)
    print(f"forward and backward of the default model: {step:.1f} s of CPU time, from every {EVERY}th micro-batch")
    algorithms = {
        name: Algorithm(load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm)
        for name in PRESETS
    }
    best = {(name, n): float("inf") for name in PRESETS for n in COUNTS}
    for _ in range(REPETITIONS):
        for name, n in best:
            best[name, n] = min(best[name, n], batch.step(algorithms[name], n))
    passed = True
    for (name, n), took in best.items():
        share, ratio = took / step, (step + took) / (step + best[name, 1])
        passed &= share <= BAR and ratio <= BAR_OF_UPDATES
        print(
            f"{name}, {n} updates: {1e3 * took:.0f} ms, {share:.2%} of the step; a step {ratio:.3f} x one of 1 update"
        )
    print(f"{'PASS' if passed else 'FAIL'}  at most {BAR:.0%} and {BAR_OF_UPDATES} x; load {os.getloadavg()[0]:.1f}")
    return int(not passed)


if __name__ == "__main__":
    raise SystemExit(main())
