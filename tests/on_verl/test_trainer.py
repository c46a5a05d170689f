"""agent_rl.backends.verl.driver.trainer: the inputs of the queue and of each worker, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doubles import example_episode
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base, trainer_sync

from agent_rl.algorithms import Algorithm
from agent_rl.backends.verl.driver import trainer as module
from agent_rl.backends.verl.driver import updates as updates_module
from agent_rl.backends.verl.driver.exchange import score_metrics
from agent_rl.backends.verl.driver.trainer import SyncTrainer
from agent_rl.backends.verl.worker.engine import STEP
from agent_rl.core.episode import Episode, Failure, Outcome, Reward
from agent_rl.errors import ConfigError, InfrastructureError
from agent_rl.gym.env import Env
from agent_rl.runs.diagnosis import Diagnosis
from agent_rl.runs.folder import METRICS
from agent_rl.runs.metrics import MetricsFile, read_metrics
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.store.token_records import TokenRecordWriter, read_token_records
from on_verl.test_backends_agree import EPISODES, in_verl, moved, nested, preset

UPDATES = 3
CONFIG = {
    "actor_rollout_ref": {
        "actor": {
            "ppo_epochs": UPDATES,
            "ppo_mini_batch_size": 2,
            "use_dynamic_bsz": True,
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": None,
        },
        "rollout": {"n": 4, "temperature": 0.7, "calculate_log_probs": False, "log_prob_use_dynamic_bsz": True},
    },
    "critic": {"ppo_epochs": UPDATES},
    "data": {
        "train_batch_size": 2,
        "agent_rl": {
            "max_staleness": 0,
            "max_rollout_gap": 0.2,
            "target_kl": None,
            "keep_checkpoints": 2,
            "judge": {},
            "renderer": "{}",
        },
    },
    "trainer": {"critic_warmup": 2},
}


class Queue:
    """verl's queue, of one batch; its `columns` are of all of the batch's rows."""

    def __init__(self, columns: TensorDict, keys: list[str]) -> None:
        self.columns, self.keys = {name: columns[name] for name in columns.keys()}, keys  # noqa: SIM118 - a TensorDict

    def of(self, name: str, keys: list[str]) -> Any:
        """Return some rows of a column."""
        column = self.columns[name]
        rows = [self.keys.index(key) for key in keys]
        return column if keys == self.keys else joined([column[row] for row in rows], column.is_nested)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return TensorDict({n: self.of(n, keys) for n in select_fields if n in self.columns}, len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        for name, column in fields.items():
            new = dict(zip(keys, column.unbind(), strict=True))
            others = self.columns.get(name, self.columns["responses"] if column.is_nested else [0 * column[0]] * 99)
            rows = [new[key] if key in new else 0 * others[row] for row, key in enumerate(self.keys)]
            self.columns[name] = joined([row.to(column.dtype) for row in rows], column.is_nested)
        tags = [TAGS[self.keys.index(key)] for key in keys]
        return KVBatchMeta(keys=keys, tags=tags, partition_id=partition_id, fields=[*self.columns])


def joined(rows: list[torch.Tensor], as_nested: bool) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged) if as_nested else torch.stack(rows)


class Workers:
    """Score a token, of the policy by its place in the row and by how often it was updated; remember their updates."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.updates, self.scored = queue, list[dict[str, Any]](), 0
        self.gap = 0.15
        """From the rollout, at the first update; twice as much at the second."""

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        self.scored += 1
        rows = [-0.01 * torch.arange(len(i)) - len(self.updates) for i in self.queue.columns["input_ids"].unbind()]
        found = {"log_probs": nested([r.tolist() for r in rows], torch.float32)}
        if batch.extra_info["calculate_entropy"]:
            found["entropy"] = found["log_probs"]
        if batch.extra_info.get("calculate_sum_pi_squared"):
            found["sum_pi_squared"] = nested([r.exp().tolist() for r in rows], torch.float32)
        self.queue.columns |= found
        return batch

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self.compute_log_prob(batch)

    def update_actor(self, batch: KVBatchMeta) -> TensorDict:
        names = self.queue.columns if batch.fields is None else batch.fields
        known = {name: self.queue.of(name, batch.keys) for name in names if name != "extra_fields"}
        self.updates.append(known | dict(batch.extra_info) | {"keys": batch.keys})
        metrics = {
            "loss": [1.0 * len(self.updates)],
            "mfu": [0.5],
            "agent_rl/rollout_gap": [self.gap * len(self.updates)],
        }
        return {"metrics": metrics}

    def train_mini_batch(self, batch: KVBatchMeta) -> Workers:
        self.output = self.update_actor(batch)
        return self

    def get(self) -> TensorDict:
        return self.output


TAGS: list[dict[str, Any]] = []


class Setup:
    def __init__(
        self, algorithm: Algorithm, folder: Path, patch: pytest.MonkeyPatch, episodes: list[Episode] = EPISODES
    ) -> None:
        columns, keys, extra, padding = in_verl(episodes)
        TAGS[:] = [{"is_padding": x} for x in padding]
        self.queue = Queue(columns, keys)
        self.queue.columns["extra_fields"] = _Objects(extra)
        for where in (module, updates_module, trainer_base):
            patch.setattr(where, "tq", self.queue)
        self.trainer = SyncTrainer.__new__(SyncTrainer)
        self.trainer.config = OmegaConf.create(
            CONFIG | {"algorithm": {"rollout_correction": {"bypass_mode": not algorithm.config.recomputes_old}}}
        )
        self.trainer.routes, self.trainer.global_steps = (), 1
        self.trainer.diagnosis = SimpleNamespace()
        self.trainer.replay_buffer = SimpleNamespace(add_to=lambda received: received)
        self.trainer.algorithm, self.trainer.store = algorithm, EpisodeWriter(folder / f"{algorithm.config.name}.jsonl")
        self.workers, self.critics = Workers(self.queue), Workers(self.queue)
        self.trainer.actor_rollout_wg = self.trainer.ref_policy_wg = self.workers
        self.trainer.critic_wg, self.trainer.ref_in_actor, self.trainer.local_trigger_step = self.critics, False, 0
        self.batch = KVBatchMeta(keys=keys, tags=TAGS, partition_id="train", fields=None, extra_info={})
        self.metrics: dict[str, Any] = {}

    def step(self, *parts: str) -> list[dict[str, Any]]:
        """Run these parts of a step; return the batches of the policy's workers."""
        for part in parts:
            self.batch = getattr(self.trainer, part)(self.batch, metrics=self.metrics)
        return self.workers.updates


class _Objects(list):
    def tolist(self) -> list[Any]:
        return [*self]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    return lambda *algorithm: Setup(preset(*algorithm), tmp_path, monkeypatch)


OLD, REFERENCE = "_compute_old_log_prob", "_compute_ref_log_prob"
LEARN = ("_compute_advantage", "_update_actor")


def test_trainer_updates_on_the_whole_batch(setup) -> None:
    made = setup("grpo", "entropy=0.1")
    updates = made.step(OLD, *LEARN)
    assert len(updates) == made.metrics["train/updates"] == UPDATES  # calls of their own
    for update in updates:
        assert update["epochs"] == 1 and update["mini_batch_size"] == update["global_batch_size"] == len(TAGS)
        assert update["temperature"] == 0.7 and update["calculate_entropy"] is True and update[STEP] == 1
        # verl's metrics read returns
        assert {"advantages", "returns", "agent_rl_weights", "agent_rl_whole"} <= update.keys()
    assert made.metrics["actor/loss"] == 2.0 and made.metrics["train/samples"] > 0  # of 1, 2 and 3


def test_trainer_stores_what_tokens_were_worth(setup, tmp_path: Path) -> None:
    made = setup("decoupled_ppo")
    made.trainer.records = TokenRecordWriter(tmp_path / "own")
    made.step(OLD, "_compute_advantage")
    weighed = made.trainer.weighed
    batch = weighed.batch.padded()
    mask, records = batch.rows.loss_mask, list(read_token_records(tmp_path / "own"))
    stored = {e.id: e for e in read_episodes(made.trainer.store.path)}
    assert len(records) == len(mask) and {r.episode for r in records} <= stored.keys()
    for row, record in enumerate(records):
        sampled = stored[record.episode].trajectories[record.trajectory].loss_mask
        own = mask[row, : len(sampled)][torch.from_numpy(sampled)].numpy()
        assert np.array_equal(record.logprobs[own], batch.scored.old_logprobs[row][mask[row]].numpy())
        kept = bool(weighed.kept[weighed.batch.rows.episode[row]])
        pushed = batch.advantages[row][mask[row]].numpy()
        assert np.array_equal(record.advantages[own], pushed if kept else pushed * np.nan, equal_nan=True)
        assert np.isnan(record.logprobs[~own]).all()


def test_trainer_divides_mini_batches_by_own_counts(setup) -> None:
    made = setup("grpo")
    cut = [int(key.startswith("pb")) for key in made.batch.keys]  # a group each
    made.trainer.mini_batch_of = cut
    updates = made.step(OLD, *LEARN)
    assert len(updates) == 2 * UPDATES and [u["keys"] for u in updates[:2]] == [u["keys"] for u in updates[2:4]]
    for number, update in enumerate(updates[:2]):
        assert update["keys"] == [key for key, its in zip(made.batch.keys, cut, strict=True) if its == number]
        counted = sum(int(row.sum()) for row in update["agent_rl_counted"].unbind())
        assert update["agent_rl_whole"][:, 0].tolist() == [counted] * len(update["keys"])


def test_trainer_takes_no_update_without_a_gradient(setup) -> None:
    made = setup("grpo")
    equal = [replace(e, rewards=(Reward("correct", 1.0),)) if e.group_id == "a" else e for e in EPISODES]
    made.trainer.replay_buffer = SimpleNamespace(
        add_to=lambda received: replace(
            received, episodes=[next(x for x in equal if x.id == e.id) for e in received.episodes]
        )
    )
    made.trainer.mini_batch_of = [int(key.startswith("pb")) for key in made.batch.keys]
    updates = made.step(OLD, *LEARN)
    assert len(updates) == UPDATES and not any(key.startswith("pa") for u in updates for key in u["keys"])


def test_batch_is_cut_into_whole_groups_of_equal_work(setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made = setup("grpo").trainer
    monkeypatch.setattr(trainer_base.PPOTrainer, "_balance_batch", lambda self, batch, *_, **__: batch)
    monkeypatch.setattr(updates_module, "upsample_batch_to_divisible_size", padded)
    made.actor_rollout_wg._dispatch_info, made.tokenizer = {"actor": [0, 1]}, SimpleNamespace(eos_token_id=0)
    settings, orders = made.config.data, []
    settings.agent_rl.shuffle, settings.agent_rl.seed, settings.train_batch_size = True, 7, 4
    rows = [(group, session, row) for group in "abcd" for session in range(3) for row in range(session + 1)][:-1]
    # rows come as their episodes end, under names that verl draws at random
    for made.global_steps, names, each in ((1, "wxyz", 1), (1, "zxyw", -1), (2, "wxyz", 1)):
        groups = dict(zip(names, "abcd", strict=True))
        monkeypatch.setattr(updates_module, "groups_of", lambda _, found=groups: found)
        keys = [f"{names['abcd'.index(group)]}_{session}_{row}" for group, session, row in rows[::each]]
        batch = KVBatchMeta(keys=[*keys], tags=[{"seq_len": len(key)} for key in keys], partition_id="train")
        taken, numbers = made._balance_batch(batch, {}).keys, made.mini_batch_of
        assert len(taken) == len(numbers) == 24 and {*keys} <= {*taken}  # one row was padded
        for number in (0, 1):
            its = [place for place, n in enumerate(numbers) if n == number]
            assert sum(place < 12 for place in its) == len(its) / 2  # equally many on both ranks
        found = {(groups[key[0]], n) for key, n in zip(taken, numbers, strict=True) if key[0] in groups}
        assert len(found) == 4  # all rows of all its episodes
        orders.append(found)
    assert orders[0] == orders[1] != orders[2]
    settings.train_batch_size = 2
    made._balance_batch(KVBatchMeta(keys=["a"], tags=[{}]), {})
    assert not made.mini_batch_of  # one update takes them all


def padded(batch: KVBatchMeta, multiple: int, _: int) -> KVBatchMeta:
    more = -len(batch) % multiple
    keys, tags = [*batch.keys, *(f"pad_{n}_0" for n in range(more))], [*batch.tags, *({"seq_len": 8},) * more]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


@pytest.mark.parametrize("algorithm", ["grpo", "m2po"])
def test_rollout_gap_is_checked_in_sync_mode_only(algorithm: str, setup) -> None:
    made = setup(algorithm)
    made.step(OLD, *LEARN)  # m2po's later updates are calls of their own, with larger gaps
    assert made.metrics["actor/agent_rl/rollout_gap"] > 0.1
    made.workers.gap = 1.12
    made.workers.updates.clear()
    made.metrics.clear()
    with pytest.raises(InfrastructureError, match=r"step 1 .* 1\.120 nats .*max_rollout_gap=0\.2"):
        made.step(OLD, *LEARN)
    made.trainer.on_policy = False  # as in asynchronous modes, whose tokens are from older weights
    made.step(OLD, *LEARN)


def test_canary_watches_every_weight_sync(setup, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextmanager
    def watch_sync(metrics: dict[str, float]) -> Iterator[None]:
        seen.append("before")
        yield
        seen.append("after")
        metrics["canary/gap"] = 0.01

    made = setup("grpo")
    made.trainer.canary = SimpleNamespace(watch_sync=watch_sync)
    for hook in ("on_init_end", "on_step_end"):
        monkeypatch.setattr(trainer_sync.PPOTrainerSync, hook, lambda self: seen.append("sync"))
        getattr(made.trainer, hook)()
    assert seen == ["before", "sync", "after"] * 2
    assert made.trainer._consume_sync_metrics() == {"canary/gap": 0.01}


def test_trainer_scores_distributions_of_old_at_responses(setup) -> None:
    made = setup("grpo", "advantage=optimal-baseline", "proximal=recompute", "kl.where=loss")
    update = made.step(OLD, REFERENCE, *LEARN)[0]
    scored = made.trainer.weighed.batch.padded().scored
    mask = scored.rows.loss_mask
    places = torch.arange(mask.shape[1]).expand_as(mask)
    expected = (-0.01 * (places - 1)).exp()  # the workers' number at the position before a token
    torch.testing.assert_close(scored.sum_pi_squared[mask], expected[mask])
    assert {"advantages", "agent_rl_weights", "ref_log_prob", "old_log_probs"} <= update.keys()


def test_trainer_prepares_the_batch_for_each_update(setup) -> None:
    made = setup("dpo")
    updates = made.step(OLD, REFERENCE, *LEARN)
    assert [u["epochs"] for u in updates] == [1] * UPDATES and made.workers.scored == 1 + UPDATES
    # theta is the reference at first: beta sigmoid(0) / two pairs
    sizes = torch.unique(updates[0]["advantages"].values().abs())
    torch.testing.assert_close(sizes, torch.tensor([0.0, 0.025]))
    first, second, third = (u["advantages"].values() for u in updates)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert made.metrics["train/pairs"] == 2 and made.metrics["actor/loss"] == 2.0


@pytest.mark.parametrize(("proximal", "scored"), [("rollout", UPDATES), ("recompute", UPDATES)])
def test_trainer_scores_theta_before_the_first_update(proximal: str, scored: int, setup) -> None:
    made = setup("m2po", f"proximal={proximal}", "objective.second_moment=0.5")
    updates = made.step(OLD, *LEARN)
    assert len(updates) == UPDATES and made.workers.scored == scored
    assert made.metrics["train/clip_fraction"] > 0


def test_trainer_updates_the_critic_on_whole_batch(setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made = setup("ppo")
    made.queue.columns["values"] = moved(made.queue.columns, 4)
    made.step(OLD, "_compute_advantage", "_update_critic")
    assert len(made.critics.updates) == UPDATES
    update = made.critics.updates[-1]
    assert update["epochs"] == 1 and update["mini_batch_size"] == len(TAGS)
    assert {"values", "returns", "agent_rl_valued"} <= update.keys()
    assert made.metrics["critic/loss"] == 2.0 and made.metrics["perf/mfu/critic"] == 0.5
    ours = made.metrics["critic/values/mean"]

    def verls(self, batch: KVBatchMeta, metrics: dict[str, float], *more: object) -> None:
        metrics |= {"critic/values/mean": 99.0, "critic/score/mean": 1.0}

    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_metrics", verls)
    made.trainer._compute_metrics(made.batch, made.metrics, {})
    assert made.metrics["critic/values/mean"] == ours and made.metrics["critic/score/mean"] == 19 / 24


def test_training_reports_leave_failed_episodes_out() -> None:
    rewards = [(Reward("correct", 1.0),)] * 18 + [(Reward("correct", 0.0),)] * 10
    scored = [example_episode(f"e{number}", rewards=found) for number, found in enumerate(rewards)]
    failed = [example_episode(f"f{number}", outcome=Outcome.FAILED, rewards=()) for number in range(4)]
    metrics = score_metrics([*scored, *failed])
    assert metrics["critic/score/mean"] == metrics["critic/rewards/mean"] == 18 / 28  # not 18 / 32
    assert (metrics["critic/score/min"], metrics["critic/score/max"]) == (0.0, 1.0)
    assert math.isnan(score_metrics(failed)["critic/score/mean"])


def test_trainer_requires_feature_metrics_of_first_update(setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made, reported = setup("grpo", "kl.where=loss"), {}
    monkeypatch.setattr(trainer_base.PPOTrainer, "step", lambda self, metrics, timing: metrics.update(reported))
    reported |= {"actor/agent_rl/loss": 0.1, "actor/agent_rl/ratio": 1.0, "train/samples": 3.0}
    made.trainer.global_steps = 1
    made.trainer.step({}, {})  # only the critic learns so far
    made.trainer.global_steps = 2
    reported["train/samples"] = 0.0
    made.trainer.step({}, {})
    reported["train/samples"] = 3.0
    with pytest.raises(ConfigError, match=r"a KL penalty \(algorithm.kl\) must report actor/agent_rl/reference_kl"):
        made.trainer.step({}, {})
    reported["actor/agent_rl/reference_kl"] = 0.0
    made.trainer.step({}, {})
    del reported["actor/agent_rl/reference_kl"]
    made.trainer.step({}, {})  # once is enough


def test_training_ends_where_no_episode_has_score(setup, tmp_path: Path) -> None:
    trainer, trackers = setup("grpo").trainer, SimpleNamespace(logger={})
    trainer.metrics = MetricsFile(tmp_path)
    trainer.diagnosis = Diagnosis(trainer.algorithm.config, 4, Env, tmp_path, print)
    trainer.logger = trackers
    lost = Failure("step", "OSError", "no disk")
    trainer.diagnosis.episodes = [example_episode("f", outcome=Outcome.FAILED, rewards=(), error=lost)]
    report = trackers.logger["agent_rl"].log
    with pytest.raises(InfrastructureError, match=r"1 of 1 episode failed .* once that is mended, the run can go on"):
        report({"train/samples": 0.0, "val-core/reward": 0.0}, 1)
    assert [row["kind"] for row in read_metrics(tmp_path / METRICS)] == ["train", "validation"]
