"""agent_rl.backends.verl.driver.trainer: what an evaluation reports, and which checkpoint it makes the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base

from agent_rl.backends.verl.driver.checkpoints import EVALUATION
from agent_rl.backends.verl.driver.trainer import SyncTrainer
from agent_rl.store.episodes import EpisodeWriter


@pytest.fixture
def trainer(tmp_path: Path) -> SyncTrainer:
    found = SyncTrainer.__new__(SyncTrainer)
    run = {"keep_checkpoints": 2, "renderer": "{}"}
    folder = {"default_local_dir": str(tmp_path / "checkpoints")}
    found.config, found.global_steps = OmegaConf.create({"data": {"agent_rl": run}, "trainer": folder}), 0
    found.store = EpisodeWriter(tmp_path)
    return found


def test_evaluation_reports_leave_failed_episodes_out(trainer: SyncTrainer) -> None:
    infos = {
        "reward": [1.0, 0.0, 0.0],  # verl's 0 for the failed one
        **{"success": [1.0, 0.0, None], "failed": [0.0, 0.0, 1.0], "scored": [1.0, 1.0, 0.0]},
    }
    metrics = trainer._val_metrics_update(["calculator-v0/eval"] * 3, ["a", "b", "c"], infos, [])
    found = {name.removesuffix("/mean@1").rpartition("/")[2]: value for name, value in metrics.items()}
    assert found["reward"] == found["success"] == 0.5 and found["failed"] == pytest.approx(1 / 3)


def test_checkpoints_are_kept_by_success_in_a_mixture(
    trainer: SyncTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, ids = ["a-v0/eval", *["b-v0/eval"] * 3], ["1", "2", "3", "4"]
    success = {2: (0, 1, 1, 1), 4: (1, 0, 0, 0), 6: (1, 0, None, 0), 8: (1, 1, 0, 0)}

    def validate(self: SyncTrainer) -> dict[str, float]:
        found = [*success[self.global_steps]]
        infos = {"reward": [0.0] * 4, "success": found, "scored": [float(x is not None) for x in found]}
        return self._val_metrics_update(sources, ids, infos, [])

    monkeypatch.setattr(trainer_base.PPOTrainer, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(trainer_base.PPOTrainer, "_validate", validate)
    for trainer.global_steps in success:
        trainer._save_checkpoint()
        trainer._validate()
    left = {path.name: path / EVALUATION for path in sorted((tmp_path / "checkpoints").iterdir())}
    assert [*left] == ["global_step_2", "global_step_6", "global_step_8"]
    assert [json.loads(file.read_text())["success"] for file in left.values()] == [3 / 4, 1 / 3, 1 / 2]
