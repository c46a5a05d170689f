"""Several updates of one batch: how groups are dealt, what each update divides by, and where it stops."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import agent_rl as ar
from agent_rl.algorithms import Algorithm, AlgorithmConfig, Denominators, Experience, WeightedRows, collate
from agent_rl.algorithms.components import objective
from agent_rl.algorithms.updates import UpdatesConfig, deal
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.mini_batches import mini_batches
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import choices, load_config
from agent_rl.core.episode import Reward, group_episodes
from agent_rl.gym.registry import spec
from agent_rl.view.progress import Progress
from tests.batches import scored
from tests.doubles import Silent, example_episode, example_sample
from tests.runs import SMALL, config


@pytest.mark.parametrize(
    ("n", "minibatches", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1]), (5, 1, [5])]
)
def test_deal_takes_every_group_once_an_epoch(n: int, minibatches: int, sizes: list[int]) -> None:
    groups = list(range(10, 10 + n))
    dealt = list(deal(groups, UpdatesConfig(minibatches=minibatches, epochs=2), 7, 3))
    for epoch in (0, 1):
        parts = [part for number, part in dealt if number == epoch]
        assert [len(part) for part in parts] == sizes
        assert sorted(group for part in parts for group in part) == groups


def test_deal_is_fixed_by_seed_and_step() -> None:
    updates, groups = UpdatesConfig(minibatches=4, epochs=2), list(range(16))
    first = list(deal(groups, updates, 7, 3))
    assert first == list(deal(groups, updates, 7, 3))
    assert first != list(deal(groups, updates, 7, 4)) != list(deal(groups, updates, 8, 3))
    assert first[:4] != [(0, part) for _, part in first[4:]]  # the second epoch deals anew
    kept = list(deal(groups, UpdatesConfig(minibatches=4, shuffle=False), 7, 3))
    assert kept == [(0, list(range(start, start + 4))) for start in (0, 4, 8, 12)]


# one group of equal scores, which has no gradient; rows of 3 to 7 sampled tokens
SCORES = {"a": (1, 0, 0), "b": (1, 1, 0), "c": (1, 1, 1), "d": (0, 0, 1), "e": (1, 0, 1)}


def experience(groups: str) -> tuple[Experience, torch.Tensor]:
    """Return these groups, and log-probabilities of their rows; a group's are the same in any company."""
    algorithm = Algorithm(AlgorithmConfig())
    made = [
        example_episode(f"{g}{n}", rewards=(Reward("r", s),), group_id=g)
        for g in groups
        for n, s in enumerate(SCORES[g])
    ]
    x = algorithm.experience(group_episodes(made))
    keys = [(ord(e.id[0]), int(e.id[1])) for e in made]
    rows = [
        example_sample(12, list(range(4, 7 + (group + n) % 5)), seed=10 * group + n, episode=at)
        for at, (group, n) in enumerate(keys)
    ]
    x = replace(x, rows=collate(rows))
    moved = [0.1 * torch.randn(12, generator=torch.Generator().manual_seed(10 * group + n)) for group, n in keys]
    return x, x.rows.rollout_logprobs.view(-1, 12) + torch.stack(moved)


@pytest.mark.parametrize("aggregation", ["token-mean", "token-sum", "seq-mean-token-mean", "prompt-mean"])
@pytest.mark.parametrize("counts_zero", [True, False])
def test_mini_batch_loss_is_that_of_its_groups_alone(aggregation: str, counts_zero: bool) -> None:
    algorithm = Algorithm(AlgorithmConfig(aggregation=aggregation, count_zero_advantage=counts_zero))
    x, theta = experience("abcde")
    weighed, _, wanted = algorithm.compute_weights_in_place_order(x, scored(x.rows))
    batch, theta = weighed.select(torch.nonzero(wanted)[:, 0]), theta[wanted]
    updates = UpdatesConfig(minibatches=2, shuffle=False)
    parts = list(mini_batches(weighed, wanted, batch, updates, 0, 0))
    for part, groups in zip(parts, ("abc", "de") if counts_zero else ("ab", "de"), strict=True):
        alone, own = experience(groups)
        expected, whole, kept = algorithm.compute_weights_in_place_order(alone, scored(alone.rows))
        loss = _loss(algorithm, expected.padded(torch.nonzero(kept)[:, 0]), own[kept], whole)
        found = [
            _loss(algorithm, part.batch.padded(cut), theta[part.rows[cut]], part.whole)
            for cut in part.batch.cut_rows(30)
        ]
        assert len(found) > 1 and sum(found) == pytest.approx(loss, abs=1e-6) and loss != 0


def _loss(algorithm: Algorithm, batch: WeightedRows, theta: torch.Tensor, whole: Denominators) -> float:
    theta = theta[:, : batch.rows.token_ids.shape[1]]
    return float(algorithm.loss(theta, torch.zeros_like(theta), batch.inputs, whole).loss)


@ar.register("brief-v0", tasks=lambda split, index: {"n": index}, splits=("train", "eval", "dev"))
class Brief(Silent):
    """Pays for brevity: whatever a model says, two samples of a task hardly ever earn the same."""

    @ar.reward
    def brevity(self, episode: ar.Episode) -> float:
        return -float(len(episode.final_text))


@pytest.fixture
def trainer(folder: Path, tmp_path: Path) -> Callable[..., Trainer]:
    """Make trainers that start from the finished run's weights."""

    def make(**changes: object) -> Trainer:
        actor = load_actor(folder / "checkpoint", slots=12, context=256)
        return Trainer(spec("brief-v0"), actor, config(tmp_path, env="brief-v0", optimizer={"lr": 5e-3}, **changes))

    return make


def test_trainer_reports_every_update(trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="agent_rl")
    found = trainer(updates={"minibatches": 2, "epochs": 3}).train_step().metrics
    taken = int(found["train/updates"])
    assert 2 < taken <= 6
    moved = [found[f"update/{n}/old_kl"] for n in range(1, taken + 1)]
    assert abs(moved[0]) < 1e-9 and found["update/1/ratio"] == pytest.approx(1, abs=1e-5)
    assert found["update/1/clip_fraction"] == 0 and min(moved[1:]) > 1e-6 and moved[-1] > moved[1]
    assert found["train/old_kl"] == pytest.approx(sum(moved) / taken)
    orders = [r.getMessage() for r in caplog.records if "update " in r.getMessage() and "epoch" in r.getMessage()]
    assert len(orders) == 6 and orders[0].startswith("step 1: update 1, epoch 1: groups [")


def test_trainer_stops_updates_at_target_kl(trainer: Callable[..., Trainer]) -> None:
    made = [trainer(updates=u) for u in ({"epochs": 4, "target_kl": 1e-7}, {"epochs": 1})]
    stopped, once = (one.train_step().metrics for one in made)
    assert stopped["train/updates"] == 1 and stopped["train/loss"] == once["train/loss"]
    one, other = (m.actor.model.state_dict() for m in made)
    assert all(torch.equal(one[name], other[name]) for name in one)  # the update that was too far left nothing
    assert all(p.grad is None for p in made[0].optimizer.parameters)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"rollout": {"weights": "int4"}}, "rollout.weights=int4 samples"),
        ({"engine": "vllm"}, "engine=vllm samples"),
        ({"precision": {"autocast": "bfloat16"}}, "precision.autocast=bfloat16 trains"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16 rounds otherwise"),
        ({"async": {"mode": "one_step_off"}}, None),  # exact, of earlier weights
        ({"async": {"mode": "one_step_off"}, "rollout": {"weights": "int4"}}, "rollout.weights=int4 samples"),
    ],
)
def test_auto_recomputes_old_where_others_sample(changes: dict[str, object], why: str | None, tmp_path: Path) -> None:
    run = config(tmp_path, **changes)
    assert (run.mismatch or "").startswith(why or "") and (run.mismatch is None) == (why is None)
    assert run.decided_algorithm.recomputes_old == (why is not None)
    kept = config(tmp_path, **changes, algorithm={"proximal": "rollout"})
    assert not kept.decided_algorithm.recomputes_old


def test_recomputed_old_is_told_with_its_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_run(config(tmp_path, steps=2, rollout={**SMALL["rollout"], "weights": "int4"}), Progress())
    told = " ".join("".join(capsys.readouterr()).split())
    assert "Old is computed anew before the first update of each batch, as rollout.weights=int4 samples" in told
    assert len(re.findall(r"Old took \d+\.\d\d s, \d+% of this step's update", told)) == 1


def test_auto_recomputes_old_only_where_it_is_read() -> None:
    for parts in ({"weight": "icepop"}, {"advantage": "optimal-baseline"}, {"rejection": "sequence"}):
        assert AlgorithmConfig.model_validate(parts).recomputes_old
    assert not AlgorithmConfig(objective="m2po").sampled_elsewhere().recomputes_old  # it compares with mu itself
    pairs = AlgorithmConfig(objective="dpo", advantage="best-against-worst", aggregation="token-sum")
    assert not pairs.sampled_elsewhere().recomputes_old


TAKEN_FOR_FRESH = {"a2c", "a2c-paper", "gpg", "reinforce", "remax", "remax-paper", "rloo", "rloo-paper"}
"""Presets whose objective has no ratio and no mask: nothing in them knows who sampled the tokens."""
LEFT_OUT = {"decoupled_ppo-paper", "dpo", "gspo", "icepop", "icepop-paper", "m2po", "m2po-paper", "rft", "rft-paper"}
"""Presets that drop what has drifted, episode by episode or for good, or learn from any policy's. All others learn less
from it, as by the clip, and still learn from it."""


@pytest.mark.parametrize("name", choices("algorithm"))
def test_stale_tokens_are_left_out_or_warned_about(name: str) -> None:
    def warning(*settings: str) -> str:
        asked = [f"algorithm={name}", "async.mode=one_step_off", *settings]
        return load_config("backend/embedded", TrainConfig, asked).uncorrected or ""

    known = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm
    only_by_old = not (known.weight or known.learns_from_any_policy) and "rollout_logprobs" not in read_by(known)
    old = "async.max_staleness=2"
    assert not warning()
    assert ("taken for fresh" in warning(old)) == (name in TAKEN_FOR_FRESH)
    assert ("only weighed" in warning(old)) == (name not in TAKEN_FOR_FRESH | LEFT_OUT)
    recomputed = warning(old, "rollout.weights=int4")  # old is as fresh as theta
    assert ("taken for fresh" in recomputed) == only_by_old
    if only_by_old:
        masked = ("algorithm.proximal=recompute", "algorithm.negative_mask={name: opsm, delta: 0.01}")
        assert not warning(old, *masked)
        assert warning("async.max_staleness=4", "algorithm.proximal=recompute")


def read_by(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    return objective[algorithm.objective].reads
