"""agent_rl.backends.verl.driver.run.Runner: what it does around verl's trainer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import transfer_queue
import verl.trainer.ppo.v1 as v1
from omegaconf import OmegaConf

from agent_rl.backends.verl.driver import run as driver
from agent_rl.backends.verl.driver import trainer as trainers
from agent_rl.gym.registry import spec


@pytest.mark.parametrize(("is_new", "latest"), [(True, "new"), (False, "before")])
def test_runner_moves_latest_once_servers_run(
    is_new: bool, latest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointed = []
    for name in ("before", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").symlink_to("before")
    (checkpoints := tmp_path / "new" / "checkpoints").mkdir()
    if not is_new:
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")

    class Trainer:
        """Looks where the link points."""

        logger = SimpleNamespace(finish=lambda exit_code: None)
        env = spec("calculator-v0")

        def __init__(self, config: object) -> None:
            assert "a secret" not in str(config), "loggers are handed it"
            self.get_llm_client = self.get_teacher_client = self.get_reward_handles = lambda: None

        def init(self) -> None:
            pointed.append((tmp_path / "latest").resolve().name)

        def fit(self, manager: object) -> None:
            pointed.append((tmp_path / "latest").resolve().name)

    monkeypatch.setitem(trainers.TRAINERS, "sync", Trainer)  # type: ignore[arg-type]
    monkeypatch.setattr(transfer_queue, "init", lambda config: None)
    monkeypatch.setattr(transfer_queue, "close", lambda: None)
    monkeypatch.setattr(v1.AgentLoopManagerTQ, "create", lambda **options: None)
    monkeypatch.setattr(driver, "watched_processes", lambda *arguments: None)
    monkeypatch.setattr(driver, "Watchdog", lambda *arguments: nullcontext())
    monkeypatch.setattr(driver, "stop_episodes", lambda manager: None)
    settings = {
        "transfer_queue": {},
        "trainer": {"v1": {"trainer_mode": "sync"}, "val_before_train": True},
        "ray_kwargs": {"ray_init": {"num_cpus": 1, "runtime_env": {"env_vars": {"API_KEY": "a secret"}}}},
        "data": {"agent_rl": {"episodes": str(tmp_path / "new" / "episodes.jsonl"), "judge": {}}},
    }
    driver.Runner().run(OmegaConf.create(settings))
    assert pointed == ["before", latest]
