"""Checkpoints: a Hugging Face folder, with the trainer's state or how its weights did, put in place in one move."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from agent_rl.backends.embedded.rollouts import load_sampled, save_sampled
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import write_setting
from agent_rl.engines.model_files import written
from agent_rl.errors import CheckpointError
from agent_rl.judge.reward import evolving_judge
from agent_rl.runs.commands import command
from agent_rl.store.lines import sync

_log = logging.getLogger(__name__)

STATE, AHEAD, CRITERIA = "trainer_state.pt", "sampled_ahead.pt", "criteria.json"
EVALUATION = "evaluation.json"
"""How the best weights did: `{"step": 40, "success": 0.96}`."""


def save_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Write a checkpoint, what was sampled ahead included. A kill meanwhile leaves the previous one whole."""
    with _replaced(folder) as new:
        trainer.actor.save(new)
        tries = trainer.rollouts.second_tries.counts
        state = {"step": trainer.step, "optimizer": trainer.optimizer.state_dict(), "second_tries": tries}
        torch.save(state, new / STATE)
        if trainer.critic is not None:
            trainer.critic.save(new)
        if (judge := evolving_judge()) is not None:
            (new / CRITERIA).write_text(json.dumps(judge.state()), encoding="utf-8")
        if trainer.ahead:
            save_sampled(new / AHEAD, trainer.ahead)
    _log.info("checkpoint of step %d written to %s", trainer.step, folder)


def save_best(folder: Path, trainer: Trainer, success: float) -> bool:
    """Write the weights there if those that are there did no better; return whether it did."""
    best = best_evaluation(folder)
    if best is not None and success < best["success"]:
        return False
    with _replaced(folder) as new:
        trainer.actor.save(new)
        (new / EVALUATION).write_text(json.dumps({"step": trainer.step, "success": success}), encoding="utf-8")
    _log.info("weights of step %d, which solved %.1f%%, written to %s", trainer.step, 100 * success, folder)
    return True


def best_evaluation(folder: Path) -> dict[str, float] | None:
    """Return at which step the best weights were evaluated, and their success; None if there are none.

    Raises:
        CheckpointError: if the file that says so is damaged.
    """
    file = folder / EVALUATION
    try:
        found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return {"step": int(found["step"]), "success": float(found["success"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged, {error!r}: remove '{folder}', and training goes on") from error


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Yield an empty path for a folder that then takes the place of this one; a kill leaves the one or the other."""
    new, old = _beside(folder)
    if left := _left_between_moves(folder):
        left[0].rename(folder)  # or a kill while the next one is written would leave none
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with written(new):
        yield new
        for file in filter(Path.is_file, new.rglob("*")):  # a tokenizer of several chat templates has them in a folder
            sync(file)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")


def _left_between_moves(folder: Path) -> list[Path]:
    """Return what a kill between two moves left in a folder's place, the newest first; nothing if it is there.

    The old one is moved away once the new one is whole. A new one without an old one may be half of the first.
    """
    new, old = _beside(folder)
    return [path for path in (new, old) if path.exists()] if old.exists() and not folder.exists() else []


def find_checkpoint(folder: Path) -> Path:
    """Return the newest whole checkpoint: the folder, or the one that a kill between two moves left beside it.

    Raises:
        CheckpointError: if there is none.
    """
    for candidate in (folder, *_left_between_moves(folder)):
        if (candidate / STATE).exists():
            return candidate
    raise CheckpointError(f"no checkpoint in '{folder}': the run stopped before its first one; start it again")


def restore(folder: Path, trainer: Trainer) -> None:
    """Restore all but the weights, which `load_actor` loads.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        trainer.step = int(state["step"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.rollouts.second_tries.counts = state.get("second_tries", {})  # earlier versions wrote none
        if trainer.critic is not None:
            trainer.critic.load(folder)
        if (judge := evolving_judge()) is not None:
            judge.restore(json.loads((folder / CRITERIA).read_text(encoding="utf-8")))
        if (folder / AHEAD).exists():
            trainer.ahead.extend(load_sampled(folder / AHEAD))
        _log.info("step %d restored from %s", trainer.step, folder)
    except Exception as error:  # of pickle, zip, torch and numpy
        raise CheckpointError(
            f"the checkpoint in '{folder}' is damaged, {type(error).__name__}: {str(error)[:200]}; start from its "
            f"weights instead: {command('train', write_setting('start_from', str(folder)))}"
        ) from error
