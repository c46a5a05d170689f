"""Checkpoints: a Hugging Face folder plus the trainer's state, and a warm start's file; put in place in one move."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agent_rl.backends.embedded.optimizer import Optimizer
from agent_rl.backends.embedded.rollouts import load_sampled, save_sampled
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.errors import CheckpointError
from agent_rl.judge.reward import evolving_judge
from agent_rl.runs.folder import make_latest
from agent_rl.runs.stop import Stop

_log = logging.getLogger(__name__)

STATE, AHEAD, CRITERIA = "trainer_state.pt", "sampled_ahead.pt", "criteria.json"
WARM_SAVE_S = 60.0
"""How often a warm start is saved, in seconds: a kill loses no more."""


def save_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Write a checkpoint, what was sampled ahead included. A kill meanwhile leaves the previous one whole."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    trainer.actor.save(new)
    torch.save({"step": trainer.step, "optimizer": trainer.optimizer.state_dict()}, new / STATE)
    if trainer.critic is not None:
        trainer.critic.save(new)
    if (judge := evolving_judge()) is not None:
        (new / CRITERIA).write_text(json.dumps(judge.state()), encoding="utf-8")
    if trainer.ahead:
        save_sampled(new / AHEAD, trainer.ahead)
    for file in new.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    _log.info("checkpoint of step %d written to %s", trainer.step, folder)


def find_checkpoint(folder: Path) -> Path:
    """Return the newest whole checkpoint: the folder, or the one that a kill between two moves left beside it.

    Raises:
        CheckpointError: if there is none.
    """
    for candidate in (folder, folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")):
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
            f"weights instead: agent-rl train start_from={folder}"
        ) from error


class WarmCheckpoint:
    """What a warm start goes on from where it was interrupted: one file in the run's folder.

    It holds the weights that are trained, the optimizer's state and the loss of every step so far, which says how many
    there were. All else follows from the seed.
    """

    def __init__(self, file: Path, stop: Stop) -> None:
        self.losses = list[float]()
        """Those of the steps taken, of both phases."""
        self._file, self._stop, self._saved = file, stop, time.monotonic()
        self._demonstrations = list[int]()

    def restore(self, model: PreTrainedModel, optimizer: Optimizer, demonstrations: list[int]) -> None:
        """Restore a model, its optimizer and the losses, if there is a file; `demonstrations` counts rows and tokens.

        Raises:
            CheckpointError: if the file is damaged, or the demonstrations are others now.
        """
        self._demonstrations = demonstrations
        if not self._file.exists():
            return
        try:
            state = torch.load(self._file, map_location="cpu", weights_only=True)
            known, self.losses = state["demonstrations"], state["losses"]
            with torch.no_grad():
                for name, parameter in _trained(model).items():
                    parameter.copy_(state["model"][name])
            optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # of pickle, zip and torch
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(f"'{self._file}' is damaged, {what}; start the run again") from error
        if known != demonstrations:
            now, then = ("{} of {} tokens".format(*counts) for counts in (demonstrations, known))
            raise CheckpointError(
                f"the demonstrations are not those of the warm start in '{self._file.parent}': {now}, not {then}; "
                "start the run again"
            )
        _log.info("warm start continues after %d steps", len(self.losses))

    def after_step(self, model: PreTrainedModel, optimizer: Optimizer, loss: float) -> None:
        """Save once in a while, and before stopping.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        self.losses.append(loss)
        if self._stop.is_asked or time.monotonic() - self._saved >= WARM_SAVE_S:
            state = {"losses": self.losses, "demonstrations": self._demonstrations}
            new = self._file.with_suffix(".new")
            torch.save(state | {"model": _trained(model), "optimizer": optimizer.state_dict()}, new)
            with new.open("rb") as handle:
                os.fsync(handle.fileno())
            new.replace(self._file)
            make_latest(self._file.parent)  # there is something to continue
            self._saved = time.monotonic()
        self._stop.check()


def _trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
