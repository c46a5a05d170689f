"""The file of a warm start under way, so that one that is cut short goes on where it was."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agent_rl.backends.embedded.optimizer import Optimizer
from agent_rl.engines.model_files import written
from agent_rl.errors import CheckpointError
from agent_rl.runs.folder import make_latest
from agent_rl.runs.stop import Stop
from agent_rl.store.lines import sync

_log = logging.getLogger(__name__)

SAVE_S = 60.0
"""How often it is saved, in seconds: a kill loses no more."""


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
        if self._stop.is_asked or time.monotonic() - self._saved >= SAVE_S:
            state = {"losses": self.losses, "demonstrations": self._demonstrations}
            new = self._file.with_suffix(".new")
            with written(new):
                torch.save(state | {"model": _trained(model), "optimizer": optimizer.state_dict()}, new)
                sync(new)
            new.replace(self._file)
            make_latest(self._file.parent)  # there is something to continue
            self._saved = time.monotonic()
        self._stop.check()


def _trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
