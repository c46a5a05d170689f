"""Which checkpoints of a run on verl are kept: the latest ones, and the best in evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

EVALUATION = "evaluation.json"
"""Beside verl's files in a checkpoint: the evaluation of its weights."""


def record_evaluation(checkpoint: Path, success: float) -> None:
    """Write the success rate of a checkpoint's weights into it; nothing if there is no such checkpoint."""
    if checkpoint.is_dir():
        (checkpoint / EVALUATION).write_text(json.dumps({"success": success}))


def remove_old(checkpoints: Path, keep: int) -> list[int]:
    """Delete all checkpoints but the `keep` latest and the best; return the steps of the deleted ones.

    The best is the one with the highest success in evaluation, the latest of equals; none if no checkpoint was
    evaluated.
    """
    found = {int(folder.name.removeprefix("global_step_")): folder for folder in checkpoints.glob("global_step_*")}
    steps = sorted(found)
    success = {step: _success(found[step]) for step in steps}
    evaluated = [step for step in steps if success[step] is not None]
    best = max(evaluated, key=lambda step: (success[step], step), default=None)
    old = [step for step in steps[:-keep] if step != best]
    for step in old:
        shutil.rmtree(found[step])
    return old


def _success(checkpoint: Path) -> float | None:
    file = checkpoint / EVALUATION
    return float(json.loads(file.read_text())["success"]) if file.exists() else None
