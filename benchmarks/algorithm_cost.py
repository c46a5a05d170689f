"""Cost of the algorithm layer relative to the training step: `python benchmarks/algorithm_cost.py`.

A million tokens of multi-turn episodes, of which the policy sampled about half: episodes → experience (shaping,
filters) → advantages, corrections, weights → diagnosis, and the loss with its gradient down to the log-probabilities;
and the token records of the batch, made and written.
Then half a million tokens with one row of 32,768 among them beside as many without, each in a process of its own: the
CPU time of experience, weighing and loss, and how far the process grew, both by token.
Beside it, forward and backward of the default model (0.7 M parameters) on rows of the same batch: measured on every
16th of its micro-batches and multiplied by their number. Numbers are CPU time (user and system, all threads) of this
process: wall time says little on a shared machine.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Experience, Rows, ScoredRows
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.config import load_config
from agent_rl.core.episode import Episode, Origin, Outcome, Reward, StopReason, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.runs.token_records import Learned
from agent_rl.store.token_records import TokenRecordWriter

TOKENS, SAMPLES, VOCAB = 1_000_000, 8, 576
PRESETS = ("grpo", "gdpo", "icepop", "gspo")
BAR, RECORDS_BAR = 0.02, 0.01
"""At most, as a share of the training step: the algorithm, and the token records."""
REPETITIONS, EVERY = 3, 16
TAIL_TOKENS, LONG = 500_000, 32_768
TAIL_BAR = 1.2
"""At most, by token, what a batch with one long row takes beside one without: time and memory."""


def episodes(tokens: int, rng: np.random.Generator, long: int = 0) -> list[Episode]:
    """Make groups of episodes of 2 to 12 turns, with at least `tokens` tokens in all; the first has `long` at least."""
    made: list[Episode] = []
    while tokens > 0 or len(made) % SAMPLES:
        trajectory, turns = Trajectory(), int(rng.integers(2, 13)) if made else max(2, long // 90)
        trajectory.append(rng.integers(0, VOCAB, 60).tolist(), Source.PROMPT, 0)
        for turn in range(turns):
            n = int(rng.integers(20, 80))
            mu = tuple(np.log(rng.uniform(0.2, 1.0, n)).tolist())
            ids = tuple(rng.integers(0, VOCAB, n).tolist())
            trajectory.append_completion(Completion(ids, mu, FinishReason.STOP, (0,) * n), turn)
            trajectory.append([0], Source.TEMPLATE, turn)
            if turn + 1 < turns:
                trajectory.append(rng.integers(0, VOCAB, int(rng.integers(20, 60))).tolist(), Source.ENV, turn + 1)
        rewards = (Reward("correct", float(rng.integers(2))), Reward("brief", float(rng.random()), weight=0.1))
        name = f"{len(made) // SAMPLES}"
        made.append(
            Episode(
                f"{name}-{len(made)}",
                "bench-v0",
                {},
                0,
                name,
                Origin("train"),
                (),
                (),
                (trajectory,),
                rewards,
                StopReason.DONE,
                Outcome.TERMINATED,
            )
        )
        tokens -= len(trajectory)
    return made


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a run, the least of several repetitions."""
    best = float("inf")
    for _ in range(REPETITIONS):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def training_step(batch: Rows, config: TrainConfig) -> float:
    """Return the CPU time of forward and backward of the default model over a batch, from a part of it."""
    model = make_model(config.model, VOCAB, seed=0)
    cuts = batch.cut(config.forward_tokens)
    part = cuts[::EVERY]

    def step() -> None:
        for micro_batch in part:
            score_tokens(model, micro_batch.token_ids).logprobs.sum().backward()

    scale = sum(int(c.lengths.sum()) for c in cuts) / sum(int(c.lengths.sum()) for c in part)
    return seconds(step) * scale


def cost(preset: str, made: list[Episode], config: TrainConfig) -> tuple[float, ...]:
    """Return the CPU times of experience, weighing, diagnosis, and the loss."""
    settings = load_config("backend/embedded", TrainConfig, [f"algorithm={preset}"]).algorithm
    algorithm = Algorithm(settings)
    x = algorithm.experience(group_episodes(made))
    old = x.rows.rollout_logprobs
    if settings.recomputes_old:
        old = old + 0.01 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    scored = ScoredRows(x.rows, old)
    batch, whole = algorithm.compute_weights(x, scored)
    micro_batches = batch.cut(config.forward_tokens)
    thetas = [(b.scored.old_logprobs + 0.001).requires_grad_() for b in micro_batches]

    def loss() -> None:
        for micro_batch, logprobs in zip(micro_batches, thetas, strict=True):
            terms = algorithm.loss(logprobs, logprobs.detach().abs(), micro_batch.inputs, whole)
            terms.loss.backward()

    return (
        seconds(lambda: algorithm.experience(group_episodes(made))),
        seconds(lambda: algorithm.compute_weights(x, scored)),
        seconds(lambda: batch.cut(config.forward_tokens)),
        seconds(lambda: algorithm.diagnose(x, scored)) if settings.recomputes_old else 0.0,
        seconds(loss),
    )


def records_cost(made: list[Episode], folder: Path) -> tuple[float, int]:
    """Return the CPU time of making and writing the token records of a batch, and their bytes."""
    algorithm = Algorithm(AlgorithmConfig())
    x = algorithm.experience(group_episodes(made))
    weighed, _, _ = algorithm.compute_weights_in_place_order(x, ScoredRows(x.rows, x.rows.rollout_logprobs))
    scores = (torch.arange(len(x.rows)), weighed.padded().rows.rollout_logprobs + 0.001)
    learned = Learned(weighed, x.kept, [scores])
    with TokenRecordWriter(folder) as writer:
        took = seconds(lambda: writer.write(learned.records(made, 0, algorithm.config)))
        return took, writer.path.stat().st_size // REPETITIONS


def layer(long: int) -> tuple[int, float, float]:
    """Take a batch through the layer, in a new process; return its tokens, CPU time and the MiB that it grew by."""
    torch.set_num_threads(1)
    config = load_config("backend/embedded", TrainConfig, [])
    made = episodes(TAIL_TOKENS, np.random.default_rng(0), long)
    cost("grpo", made[:SAMPLES][1:], config)  # what is loaded on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = sum(cost("grpo", made, config))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return sum(len(e.trajectories[0]) for e in made), took, grown


def compare_tail() -> None:
    """Print what a long row costs the others."""
    by_token = []
    for name, long in (("even", 0), ("tail", LONG)):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            tokens, took, grown = alone.submit(layer, long).result()
        print(f"{name}: {tokens:,} tokens, {1e3 * took:.0f} ms of CPU time, {grown:.0f} MiB")
        by_token.append((took / tokens, grown / tokens))
    for what, even, tail in zip(("time", "memory"), *by_token, strict=True):
        verdict = "PASS" if tail <= TAIL_BAR * even else "FAIL"
        print(f"{verdict}  {what} with a long row: {tail / even:.2f} times that without (at most {TAIL_BAR})")


def main() -> None:
    torch.set_num_threads(1)
    config = load_config("backend/embedded", TrainConfig, [])
    made = episodes(TOKENS, np.random.default_rng(0))
    batch = Experience.of(group_episodes(made)).rows
    tokens, sampled = int(batch.lengths.sum()), int(batch.loss_mask.sum())
    print(f"{tokens:,} tokens in {len(batch):,} rows, {sampled:,} of them sampled; load {os.getloadavg()[0]:.1f}")
    step = training_step(batch, config)
    print(f"forward and backward of the default model: {step:.1f} s of CPU time, from every {EVERY}th micro-batch\n")
    parts = ("experience", "weigh", "cut", "diagnose", "loss")
    print(f"{'ms of CPU time':16}" + "".join(f"{name:>12}" for name in (*parts, "all")))
    shares = {}
    for preset in PRESETS:
        costs = cost(preset, made, config)
        shares[preset] = sum(costs) / step
        print(f"{preset:16}" + "".join(f"{1e3 * x:12.0f}" for x in (*costs, sum(costs))))
    print(f"\nload {os.getloadavg()[0]:.1f}")
    for preset, share in shares.items():
        verdict = "PASS" if share <= BAR else "FAIL"
        print(f"{verdict}  {preset}: {share:.2%} of the training step (at most {BAR:.0%})")

    with TemporaryDirectory() as folder:
        took, size = records_cost(made, Path(folder))
    verdict = "PASS" if took / step <= RECORDS_BAR else "FAIL"
    print(f"{verdict}  token records: {took / step:.2%} of the training step (at most {RECORDS_BAR:.0%}), ", end="")
    print(f"{size / sampled:.1f} bytes a sampled token")
    compare_tail()


if __name__ == "__main__":
    main()
