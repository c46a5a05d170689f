"""Small runs of the embedded trainer, for the tests that need one."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.embedded.trainer import StepResult, Trainer
from agent_rl.runs.metrics import WALL, read_metrics
from agent_rl.store.token_records import TOKEN_RECORDS
from agent_rl.view.progress import Progress

T = TypeVar("T")
SMALL = {
    "env": "calculator-v0",
    "threads": 1,
    "steps": 4,
    "checkpoint_every": 2,
    "vocab_size": 480,
    "model": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate": 64},
    "warm_start": {"demonstrations": 64, "copy_steps": 2, "copy_share": 0.25, "clone_steps": 12, "batch": 8},
    "optimizer": {"lr": 5e-4, "decay_from": 1.0},
    "rollout": {"groups": 3, "samples": 4, "temperature": 1.0, "slots": 8, "max_tokens": 24},
    "eval": {"n": 8, "dev_n": 4, "every": 2},
}


def config(tmp_path: Path, **changes: object) -> TrainConfig:
    settings = SMALL | {"runs_dir": str(tmp_path / "runs")}
    if "start_from" in changes:
        del settings["warm_start"]
    return TrainConfig.model_validate(settings | changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_actor(folder / "checkpoint").model.state_dict()


def untimed(metrics: Mapping[str, T]) -> dict[str, T]:
    """Metrics without those that measure time, which no two runs share."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/") and name != WALL}


def metrics_of(folder: Path) -> list[dict[str, object]]:
    """The metrics of a run, without those that measure time."""
    return [untimed(row) for row in read_metrics(folder / "metrics.jsonl")]


def killed_run(settings: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start a run that dies in its fourth step, one step after a checkpoint; return its folder."""
    real = Trainer.train_step

    def dies(self: Trainer) -> StepResult:
        if self.step == 3:
            raise MemoryError("killed")
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", dies)
    with pytest.raises(MemoryError):
        start_run(settings, Progress())
    monkeypatch.undo()
    return (Path(settings.runs_dir) / "latest").resolve()


def whole_and_killed(
    settings: TrainConfig, monkeypatch: pytest.MonkeyPatch, dies_in: str = "train_step", call: int = 1
) -> tuple[Path, Path]:
    """Run to the end; return its folder, and a copy of what a kill in the fourth step would have left there.

    `call` is which of the step's calls of the trainer's method `dies_in` is cut short.
    """
    real, copy, calls = getattr(Trainer, dies_in), Path(settings.runs_dir) / "killed", list[int]()

    def copies(self: Trainer, *args: object) -> object:
        calls.append(self.step)
        if self.step == 3 and calls.count(3) == call and not copy.exists():
            shutil.copytree(copy.with_name("latest").resolve(), copy, symlinks=True)
        return real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, dies_in, copies)
        return start_run(settings, Progress()), copy


def assert_same_run(one: Path, two: Path) -> None:
    """Check that two runs have the same weights, metrics and token records, bit for bit."""
    first, second = weights(one), weights(two)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert metrics_of(one) == metrics_of(two)
    assert (one / TOKEN_RECORDS).read_bytes() == (two / TOKEN_RECORDS).read_bytes()
