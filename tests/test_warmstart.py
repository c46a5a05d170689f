"""The warm start's batches, and the optimizer it shares with training."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.optimizer import Optimizer, OptimizerConfig, default_lr, schedule
from agent_rl.backends.embedded.warm_start import WarmStep, _copies, _epochs, _parts, _row, warm_start
from agent_rl.backends.embedded.warm_start_config import WarmStartConfig
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.errors import ConfigError
from agent_rl.rendering import train_tokenizer

TINY = ModelConfig(hidden=32, layers=2, heads=2, kv_heads=2, head_dim=16, intermediate=64)


def test_copies_weigh_repeated_tokens_only() -> None:
    rows = _copies(50, alphabet=list(range(10, 60)), separators=[1, 2], rng=np.random.default_rng(0))
    for ids, weights in rows:
        assert len(ids) == len(weights) == 64 and 0 < sum(weights) < 64
        for at, weight in enumerate(weights):
            if weight and ids[at - 1] > 2:  # inside a repeat: the pair of tokens stood there before
                assert (ids[at - 1], ids[at]) in set(pairwise(ids[:at]))


def test_epochs_shuffle_every_row_once() -> None:
    rows = [([i] * (1 + i % 40), [1.0] * (1 + i % 40)) for i in range(200)]
    batches = _epochs(rows, 10, np.random.default_rng(0))
    epochs = [[ids[0] for _ in range(20) for ids, _ in next(batches)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(200))
    assert len(next(_epochs(rows[:3], 10, np.random.default_rng(0)))) == 3


def test_parts_are_halves_within_the_budget() -> None:
    rows = [([i] * (1 + i % 40), [1.0] * (1 + i % 40)) for i in range(60)]
    assert [len(part) for part in _parts(rows, 2**31)] == [30, 30]
    parts = list(_parts(rows, 100))
    assert all(len(part) * max(len(ids) for ids, _ in part) <= 100 for part in parts)
    assert sorted(ids for part in parts for ids, _ in part) == sorted(ids for ids, _ in rows)
    assert [len(part) for part in _parts(rows[:3], 1)] == [1, 1, 1], "a row longer than the budget is whole"


def test_rows_weigh_repeated_prefixes_nothing() -> None:
    whole, fork = Trajectory(), Trajectory(Fork(0, 2))
    for trajectory in (whole, fork):
        trajectory.append([5, 6, 7], Source.PROMPT, 0)
        trajectory.append_completion(Completion((8, 9), (0.0, 0.0), FinishReason.STOP, (0, 0)), 0)
    assert _row(whole, 0.2) == ([5, 6, 7, 8, 9], [0.2, 0.2, 0.2, 1, 1])
    assert _row(fork, 0.2) == ([5, 6, 7, 8, 9], [0, 0, 0.2, 1, 1])


def test_warm_start_refuses_missing_demonstrations() -> None:
    with pytest.raises(ConfigError, match="no demonstrations"):
        warm_start(make_model(TINY, 64, 0), [], WarmStartConfig(), tokenizer=None, seed=0)  # type: ignore[arg-type]


def short_trajectories() -> list[Trajectory]:
    trajectories = []
    for start in range(4):
        trajectories.append(trajectory := Trajectory())
        trajectory.append(range(5 + start, 12), Source.PROMPT, 0)
        trajectory.append_completion(Completion((20 + start, 9), (0.0, 0.0), FinishReason.STOP, (0, 0)), 0)
    return trajectories


@pytest.mark.parametrize("batch", [1, 2])
def test_warm_start_clones_in_batches_of_mostly_copies(batch: int) -> None:
    tokenizer, steps = train_tokenizer(["some words"], 432), list[WarmStep]()
    own = {"copy_steps": 0, "copy_share": 0.8, "clone_steps": 2, "batch": batch}
    how = {"tokenizer": tokenizer, "seed": 0, "on_step": steps.append}
    warm_start(make_model(TINY, len(tokenizer), 0), short_trajectories(), WarmStartConfig.model_validate(own), **how)
    assert [(step.phase, step.step) for step in steps] == [("cloning", 0), ("cloning", 1)]


def test_warm_start_ignores_tokens_of_weight_zero() -> None:
    trajectories, tokenizer, found = short_trajectories(), train_tokenizer(["some words"], 432), []
    for weight in (0, 1e-9):  # with 0 there are no logits for these tokens, and they are the same but for rounding
        model = make_model(TINY, len(tokenizer), 0)
        own = {"copy_steps": 0, "copy_share": 0, "clone_steps": 3, "batch": 4, "env_weight": weight}
        config = WarmStartConfig.model_validate(own | {"optimizer": {"muon_lr": 0, "warmup_steps": 0}})
        warm_start(model, trajectories, config, tokenizer=tokenizer, seed=0)
        found.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_warm_start_lowers_the_weight_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, weights = train_tokenizer(["some words"], 432), list[float]()

    def row(trajectory: Trajectory, env_weight: float) -> tuple[list[int], list[float]]:
        weights.append(env_weight)
        return _row(trajectory, env_weight)

    monkeypatch.setattr(f"{_row.__module__}._row", row)
    own = WarmStartConfig(copy_steps=0, copy_share=0, clone_steps=4, batch=1)
    warm_start(make_model(TINY, len(tokenizer), 0), short_trajectories(), own, tokenizer=tokenizer, seed=0)
    assert weights == pytest.approx([0.2, 0.15, 0.1, 0.05])


def test_schedule_rises_and_falls() -> None:
    config = OptimizerConfig(warmup_steps=4, decay_from=0.5, final=0.1)
    factors = [schedule(config, step, 20) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[4:11] == [1.0] * 7
    assert factors[11:] == sorted(factors[11:], reverse=True) and factors[19] == pytest.approx(0.19)
    assert schedule(OptimizerConfig(warmup_steps=0, decay_from=1.0), 19, 20) == 1.0


def test_muon_takes_hidden_matrices_only() -> None:
    model = make_model(TINY.model_copy(update={"architecture": "qwen3_moe"}), 64, 0)
    optimizer = Optimizer(model, OptimizerConfig(muon_lr=0.01))
    adam, muon = (part.param_groups[0]["params"] for part, _ in optimizer._parts)
    names = {id(p): name for name, p in model.named_parameters()}
    in_muon = {names[id(p)] for p in muon}
    assert any("q_proj" in n for n in in_muon) and not any("gate.weight" in n or "embed" in n for n in in_muon)
    assert len(adam) + len(muon) == len(list(model.parameters()))


def test_learning_rate_follows_the_size_of_the_model() -> None:
    large = torch.nn.Linear(4000, 2500, device="meta")
    assert Optimizer(large, OptimizerConfig()).lr == default_lr(large) == 1e-5
    assert default_lr(make_model(TINY, 64, 0)) == 2e-3
    assert Optimizer(large, OptimizerConfig(), sampled_by="int4").lr == 5e-6
    assert Optimizer(large, OptimizerConfig(), updates=4).lr == 2.5e-6
    assert Optimizer(large, OptimizerConfig(lr=0.1), sampled_by="int4", updates=4).lr == 0.1
    large.peft_config = {}
    assert default_lr(large) == 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_optimizer_skips_non_finite_gradients(bad: float) -> None:
    model = make_model(TINY, 64, 0)
    optimizer = Optimizer(model, OptimizerConfig())
    before = [p.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, bad)
    assert not np.isfinite(optimizer.step(1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
