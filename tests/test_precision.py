"""Precision: autocast, the float32 head, loss scaling, and their exact resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.checkpoint import restore, save_checkpoint
from agent_rl.backends.embedded.optimizer import Optimizer, OptimizerConfig
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.gym.registry import spec
from tests.engines import VOCAB, tiny
from tests.runs import config, untimed

IDS = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))


def trainer(start: Path, tmp_path: Path, **precision: object) -> Trainer:
    """A trainer from a checkpoint's weights; it learns in every step, even from equal rewards."""
    settings = config(tmp_path, precision=precision, algorithm={"entropy": 0.01, "proximal": "recompute"})
    return Trainer(spec("calculator-v0"), load_actor(start, slots=8, context=256), settings)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_run_by_the_kernels_of_the_backward(device: str) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with PrecisionConfig().region(torch.device(device)):
        assert torch.are_deterministic_algorithms_enabled() == (device == "cuda")
    assert not torch.are_deterministic_algorithms_enabled()


def test_float32_head_narrows_the_gap(folder: Path, tmp_path: Path) -> None:
    one = trainer(folder / "checkpoint", tmp_path)
    _, episodes = one.evaluate(one.spec.tasks.distinct("dev", 12), one.rollouts.params_of(0), "dev", "gap")

    def gap(**precision: object) -> float:
        """The mean distance of the training forward's log-probabilities from the engine's."""
        gaps = []
        for trajectory in (e.trajectories[0] for e in episodes):
            ids, mask = torch.tensor(trajectory.token_ids[None].astype(np.int64)), trajectory.loss_mask
            with torch.no_grad():
                scores = score_tokens(one.actor.model, ids, precision=PrecisionConfig.model_validate(precision))
            gaps.append(np.abs(scores.logprobs[0].numpy()[mask] - trajectory.logprobs[mask]))
        return float(np.concatenate(gaps).mean())

    exact, with_head, without = gap(), gap(autocast="bfloat16"), gap(autocast="bfloat16", head="model")
    assert exact < 1e-5 < with_head < 0.9 * without
    assert gap(head="model") == exact  # the weights are float32: without autocast there is nothing to widen


def test_trainer_applies_the_precision_settings(folder: Path, tmp_path: Path) -> None:
    """Under theta and under old, whose gap to mu the metrics hold."""
    found = []
    for precision in ({}, {"autocast": "bfloat16"}, {"autocast": "bfloat16", "head": "model"}):
        one = trainer(folder / "checkpoint", tmp_path, **precision)
        metrics = one.train_step().metrics
        found.append((metrics["train/rollout_gap"], metrics["mismatch/gap_mean"]))
    for exact, with_head, without in zip(*found, strict=True):
        assert exact < 1e-5 < with_head < without


@pytest.mark.parametrize("head", ["float32", "model"])
@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_autocast_gradients_are_close_and_float32(format: str, head: str) -> None:
    found = []
    for precision in (PrecisionConfig(), PrecisionConfig(autocast=format, head=head, chunk=10)):
        model = tiny()
        score_tokens(model, IDS, entropy_gradient=True, precision=precision).logprobs.mean().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    exact, other = found
    assert not torch.equal(exact, other)
    assert torch.cosine_similarity(exact, other, dim=0) > 0.99


# --- loss scaling ---


def test_overflow_skips_the_update_and_halves_scale() -> None:
    model = tiny()
    optimizer = Optimizer(model, OptimizerConfig(), scale_loss=True)
    start = optimizer.loss_scale

    def step(factor: float) -> tuple[float, bool]:
        before = [p.detach().clone() for p in model.parameters()]
        scores = score_tokens(model, IDS, precision=PrecisionConfig(autocast="float16"))
        optimizer.backward(-scores.logprobs.mean() * factor)
        norm = optimizer.step(1.0)
        return norm, any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    norm, changed = step(1e5)  # times the scale of 65536, beyond float16's 65504 by far
    assert not np.isfinite(norm) and not changed and optimizer.loss_scale == start / 2
    norm, changed = step(1.0)
    assert np.isfinite(norm) and changed and optimizer.loss_scale == start / 2


@pytest.mark.parametrize("muon_lr", [0.0, 0.05])
def test_loss_scaling_is_exact_without_rounding(muon_lr: float) -> None:
    weights = []
    for scale_loss in (False, True):  # a power of two, in float32
        model = tiny()
        optimizer = Optimizer(model, OptimizerConfig(muon_lr=muon_lr), scale_loss=scale_loss)
        for _ in range(2):
            for row in IDS:  # two micro-batches a step
                optimizer.backward(-score_tokens(model, row[None]).logprobs.mean())
            optimizer.step(1.0)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("format", [pytest.param("bfloat16", marks=pytest.mark.sandbox), "float16"])
def test_trainer_resumes_bit_for_bit_under_autocast(format: str, folder: Path, tmp_path: Path) -> None:
    def go(one: Trainer, steps: int) -> list[dict[str, float]]:
        return [untimed(one.train_step().metrics) for _ in range(steps)]

    one = trainer(folder / "checkpoint", tmp_path, autocast=format)
    if format == "float16":  # an overflow, so that the scale is not the first one
        one.optimizer.backward(sum(p.sum() for p in one.actor.model.parameters()) * 1e38)
        one.optimizer.step(1.0)
    go(one, 2)
    save_checkpoint(tmp_path / "checkpoint", one)
    two = trainer(tmp_path / "checkpoint", tmp_path, autocast=format)
    restore(tmp_path / "checkpoint", two)
    expected = go(one, 2)
    assert go(two, 2) == expected and all(m["train/samples"] for m in expected)
    assert two.optimizer.loss_scale == one.optimizer.loss_scale == {"bfloat16": 1, "float16": 2**15}[format]
    states = (t.actor.model.state_dict().values() for t in (one, two))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
