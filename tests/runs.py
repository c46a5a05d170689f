"""Small runs of the embedded trainer, for the tests that need one."""

from pathlib import Path

import torch

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.metrics import read_metrics
from agent_rl.backends.embedded.student import load_student

SMALL = {
    "env": "calculator-v0",
    "threads": 1,
    "steps": 4,
    "checkpoint_every": 2,
    "vocab_size": 480,
    "model": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate": 64},
    "warm_start": {"demonstrations": 64, "copy_steps": 2, "copy_share": 0.25, "clone_steps": 12, "batch": 8},
    "rollout": {"groups": 3, "samples": 4, "slots": 8, "max_tokens": 24},
    "eval": {"n": 8, "dev_n": 4, "every": 2},
}


def config(tmp_path: Path, **changes: object) -> TrainConfig:
    return TrainConfig.model_validate(SMALL | {"runs_dir": str(tmp_path / "runs")} | changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_student(folder / "checkpoint").model.state_dict()


def told(folder: Path) -> list[dict[str, object]]:
    """The metrics of a run, without those that measure time."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
