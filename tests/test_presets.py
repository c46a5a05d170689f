"""Every preset on real rollouts of the embedded model, and dynamic sampling."""

from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import load_config
from agent_rl.gym.registry import spec
from tests.batches import PRESETS
from tests.runs import config


@pytest.mark.parametrize("name", PRESETS)
def test_preset_learns_from_real_rollouts(name: str, folder: Path, tmp_path: Path) -> None:
    preset = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm
    if name.startswith("rft"):  # a model of two layers succeeds at nothing
        preset = preset.model_copy(update={"filters": ({"name": "successful", "threshold": 0.0},)})
    settings = config(tmp_path, algorithm=preset.model_dump())
    actor, start = (load_actor(folder / "checkpoint", slots=8, context=256) for _ in range(2))
    trainer = Trainer(spec("calculator-v0"), actor, settings, start.model)
    before = trainer.actor.model.lm_head.weight.clone()
    metrics = [trainer.train_step().metrics for _ in range(3)]
    trained = [m for m in metrics if m["train/samples"]]
    assert trained and not torch.equal(before, trainer.actor.model.lm_head.weight)
    for row in trained:
        assert all(np.isfinite(value) for value in row.values())
        # one update from the weights that sampled: mu, old and theta are the same
        assert row["train/ratio"] == pytest.approx(1.0, abs=1e-4) and row["train/weight"] == pytest.approx(
            1.0, abs=1e-4
        )
        assert row.get("mismatch/gap_max", 0.0) < 1e-4


def test_dynamic_sampling_fills_the_batch(folder: Path, tmp_path: Path) -> None:
    algorithm = {"filters": ["varied-groups"], "refill": {"max_rounds": 3, "oversampling": 2.0}}
    settings = config(tmp_path, algorithm=algorithm)
    trainer = Trainer(spec("calculator-v0"), load_actor(folder / "checkpoint", slots=8, context=256), settings)
    results = [trainer.train_step() for _ in range(4)]
    ids = [e.id for r in results for e in r.episodes]
    tasks = [str(e.task) for r in results for e in r.episodes]
    assert len(set(ids)) == len(ids) and len(set(tasks)) > len(ids) / 4 / 2
    for result in results:
        groups = {e.group_id for e in result.episodes}
        varied = {g for g in groups if len({e.reward for e in result.episodes if e.group_id == g}) > 1}
        filled = min(3, len(varied)) / 3
        assert result.metrics["rollout/batch_filled"] == pytest.approx(filled)
        assert filled == 1 or result.metrics["rollout/rounds"] == 3
        assert result.metrics["train/samples"] == 4 * 3 * filled
    assert any(r.metrics["rollout/rounds"] > 1 and r.metrics["train/samples"] for r in results)


def test_unfilled_batch_is_skipped(folder: Path, tmp_path: Path) -> None:
    algorithm = {"filters": ["varied-groups"], "refill": {"max_rounds": 2, "oversampling": 1.0}}
    settings = config(tmp_path, algorithm=algorithm, rollout={"groups": 2, "samples": 2, "slots": 8, "max_tokens": 24})
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"samples": 1})})
    trainer = Trainer(spec("calculator-v0"), load_actor(folder / "checkpoint", slots=8, context=256), settings)
    before = trainer.actor.model.lm_head.weight.clone()
    result = trainer.train_step()  # a group of one never differs, so that none is kept
    assert result.metrics["rollout/batch_filled"] == 0 and result.metrics["train/samples"] == 0
    assert len(result.episodes) == 4 and torch.equal(before, trainer.actor.model.lm_head.weight)
