"""verl on CPU with a critic, with a reference, and with updates prepared on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import load_config
from tests.e2e.servers import complete

RUN = {
    "env": "calculator-v0",
    "steps": 2,
    "lr": 1e-3,
    "checkpoint_every": 2,
    "updates": {"epochs": 2},
    "rollout": {"groups": 8, "samples": 8, "max_tokens": 56, "context": 128},  # DPO needs a group that differs
    "eval": {"n": 16, "every": 0},
}

pytestmark = pytest.mark.e2e


def trained(python: Path, warm: Path, folder: Path, *changes: str) -> tuple[Path, list[dict[str, Any]]]:
    """Run two steps; return the run's folder and the metrics of each."""
    algorithm = load_config("backend/embedded", TrainConfig, changes).algorithm.model_dump(mode="json")
    running = complete(python, folder, RUN | {"start_from": str(warm), "algorithm": algorithm})
    return running.run.resolve(), [row["data"] for row in running.rows() if row["step"] > 0]


def test_verl_critic_warms_up_before_the_policy(verl_python: Path, warm: Path, tmp_path: Path) -> None:
    changes = ("critic.warmup_steps=1", "entropy=0.01", "kl.where=reward", "kl.kind=k1")
    folder, (first, second) = trained(
        verl_python, warm, tmp_path, "algorithm=ppo", *(f"algorithm.{change}" for change in changes)
    )
    assert abs(first["critic/values/mean"]) < 0.01 < abs(second["critic/values/mean"])
    assert first["critic/vf_loss"] > 0 and first["critic/grad_norm"] > 0
    assert not [name for name in first if name.startswith("actor/agent_rl/")]
    assert second["actor/agent_rl/entropy"] > 0 and "actor/agent_rl/reference_kl" in second
    assert second["actor/agent_rl/rollout_gap"] < 0.2 and second["actor/grad_norm"] > 0
    saved = folder / "checkpoints" / "global_step_2" / "critic"
    assert {file.name.split("_")[0] for file in saved.glob("*.pt")} == {"model", "optim", "extra"}


def test_verl_scores_the_batch_before_each_update(verl_python: Path, warm: Path, tmp_path: Path) -> None:
    _, (first, second) = trained(verl_python, warm, tmp_path, "algorithm=dpo")
    # of two updates, on average: before the first of all, policy and reference are the same, and every margin is 0
    assert first["train/pairs"] >= 1 and first["rewards/margins"] > 0 and first["train/updates"] == 2
    assert first["rewards/accuracies"] > 0.25 and second["actor/agent_rl/loss"] != 0
