"""verl's asynchronous replay buffer keeps what `async.max_staleness` promises, in a simulated run with stragglers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from agent_rl.backends.verl.config.async_keys import asynchronous
from agent_rl.runs.config import AsyncConfig

GROUPS, STEPS = 4, 100
POLL = 1


class Queue:
    """The TransferQueue's key-value store, and the servers: a group's token is sampled a while after it was asked for.

    Time passes when the buffer polls, and while a step trains. A server samples with the newest weights that it has,
    and a group ends with a token of the moment that it began, which is the oldest that it can have.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.now, self.version, self.submitted = 0, 0, 0
        self.tags: dict[str, dict[str, object]] = {}
        self.due: dict[str, int] = {}
        self.oldest: dict[str, int] = {}

    def submit(self, n: int, step: int) -> None:
        for _ in range(n):
            key = f"g{self.submitted}"
            self.submitted += 1
            self.due[key] = self.now + int(self.rng.choice([1, 1, 1, 2, 5, 8, 11, 14, 40]))  # a step takes 2
            self.oldest[key] = self.version
            self.tags[key] = {"is_prompt": True, "status": "running", "global_steps": step}

    def pass_time(self, ticks: int) -> None:
        self.now += ticks
        for key, due in self.due.items():
            if key in self.tags and due <= self.now:
                self.tags[key]["status"] = "finished"
                self.tags.setdefault(f"{key}_0_0", {"status": "success"})

    def kv_list(self) -> dict[str, dict[str, dict[str, object]]]:
        return {"train": self.tags}

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.tags.pop(key, None)


def simulate(monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], seed: int) -> tuple[Counter[int], int]:
    """Train for a while; return the numbers of groups by staleness, and of dropped ones."""
    queue = Queue(seed)
    monkeypatch.setattr(replay_buffer, "tq", queue)
    monkeypatch.setattr(replay_buffer.time, "sleep", lambda seconds: queue.pass_time(POLL))
    step = 1
    buffer = ReplayBufferAsync(
        trainer_mode="separate_async",
        trainer_config=SimpleNamespace(),
        max_off_policy_threshold=settings["trainer.v1.sampler.max_off_policy_threshold"],
        max_off_policy_strategy=settings["trainer.v1.sampler.max_off_policy_strategy"],
        sampler_kwargs={},
        refill_fn=lambda n: queue.submit(n, step),
    )
    queue.submit(GROUPS * int(str(settings["trainer.v1.separate_async.num_warmup_batches"])), 1)
    found: Counter[int] = Counter()
    dropped = 0
    for step in range(1, STEPS + 1):
        queue.submit(GROUPS, step)
        batch, metrics = buffer.sample(step, "train", GROUPS)
        dropped += int(metrics.get("training/off_policy/evicted_samples", 0))
        found.update((step - 1) - queue.oldest[key.split("_")[0]] for key in batch.keys)
        queue.kv_clear("train", batch.keys)
        queue.pass_time(2)  # the update
        queue.version = step
    return found, dropped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_replay_buffer_bounds_staleness(
    on_stale: str, max_staleness: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AsyncConfig.model_validate({"mode": "separate", "max_staleness": max_staleness, "on_stale": on_stale})
    found, dropped = simulate(monkeypatch, dict(asynchronous(config)), seed)
    assert found.total() == STEPS * GROUPS
    assert max(found) == max_staleness  # reached, and not exceeded
    assert (dropped > 0) == (on_stale == "drop")


def test_replay_buffer_exceeds_staleness_with_two_warmup_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dict(asynchronous(AsyncConfig(mode="separate", max_staleness=1, on_stale="wait")))
    settings["trainer.v1.separate_async.num_warmup_batches"] = 2
    found, _ = simulate(monkeypatch, settings, 0)
    assert max(found) > 1
