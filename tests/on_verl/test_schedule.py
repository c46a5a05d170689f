"""verl's own loop with our settings: when it evaluates, saves and ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base

from agent_rl.backends.verl.config.settings import VerlConfig, verl_settings
from agent_rl.backends.verl.driver.trainer import SyncTrainer


class Loop(SyncTrainer):
    """A trainer whose steps do nothing; it writes down what the loop asks for, with the step."""

    logger: Any = SimpleNamespace(log=lambda **_: None)

    def __init__(self, settings: dict[str, object]) -> None:
        self.config = OmegaConf.create({"global_profiler": {"steps": None}})
        for key, value in settings.items():
            if key.startswith("trainer."):
                OmegaConf.update(self.config, key, value)
        self.global_steps, self.asked = 0, list[tuple[str, int]]()
        self.total_training_steps = self.steps_per_epoch = self.config.trainer.total_training_steps

    def note(self, what: str) -> dict[str, float]:
        self.asked.append((what, self.global_steps))
        return {"success": 0.0}

    def step(self, *_: object) -> SimpleNamespace:
        self.note("train")
        return SimpleNamespace(keys=[], partition_id="train")

    def _validate(self) -> dict[str, float]:
        return self.note("evaluate")

    def _save_checkpoint(self) -> None:
        self.note("save")


for name in (
    *("on_train_begin", "on_train_end", "on_step_begin", "on_step_end", "on_validate_begin", "on_validate_end"),
    *("_start_profiling", "_stop_profiling", "_reissue_inflight_prompts", "_shutdown_dump_executor"),
    "_compute_metrics",
):
    setattr(Loop, name, lambda self, *_, **__: None)
Loop._consume_sync_metrics = lambda self: {}  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("settings", "evaluated", "saved"),
    [
        ({"eval": {"every": 2}, "checkpoint_every": 3}, [0, 2, 4, 6, 7], [3, 6, 7]),
        ({"eval": {"every": 0}, "checkpoint_every": 7}, [0, 7], [7]),
    ],
)
def test_verl_evaluates_and_saves_as_often_as_asked(
    settings: dict[str, Any], evaluated: list[int], saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger", "SkipManager", "tq"):
        nothing = SimpleNamespace(init=lambda _: None, set_step=lambda _: None, kv_clear=lambda **_: None)
        monkeypatch.setattr(trainer_base, part, nothing if part in ("SkipManager", "tq") else lambda **_: Loop.logger)
    config = VerlConfig.model_validate({"env": "calculator-v0", "start_from": "/models/m", "steps": 7} | settings)
    loop = Loop(verl_settings(config, tmp_path))
    loop.fit(agent_loop_manager=None)
    assert [step for what, step in loop.asked if what == "train"] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for what, step in loop.asked if what == "evaluate"] == evaluated
    assert [step for what, step in loop.asked if what == "save"] == saved
