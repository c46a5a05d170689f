"""Checkpoints: a Hugging Face folder plus the trainer's state, put in place in one move."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

import torch

from agent_rl.backends.embedded.actor import Actor
from agent_rl.backends.embedded.critic import Critic
from agent_rl.backends.embedded.optimizer import Optimizer
from agent_rl.backends.embedded.rollouts import StepBatch, load_sampled, save_sampled
from agent_rl.errors import CheckpointError

STATE, AHEAD = "trainer_state.pt", "sampled_ahead.pt"


def save_checkpoint(
    folder: Path,
    actor: Actor,
    optimizer: Optimizer,
    step: int,
    critic: Critic | None = None,
    ahead: Collection[StepBatch] = (),
) -> None:
    """Write a checkpoint, batches `ahead` of their step included. A kill meanwhile leaves the previous one whole."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    actor.save(new)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, new / STATE)
    if critic is not None:
        critic.save(new)
    if ahead:
        save_sampled(new / AHEAD, ahead)
    for file in new.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder: Path) -> Path:
    """Return the newest whole checkpoint: the folder, or the one that a kill between two moves left beside it.

    Raises:
        CheckpointError: if there is none.
    """
    for candidate in (folder, folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")):
        if (candidate / STATE).exists():
            return candidate
    raise CheckpointError(f"no checkpoint in '{folder}': the run stopped before its first one; start it again")


def load_state(folder: Path, optimizer: Optimizer, critic: Critic | None = None) -> int:
    """Restore the optimizer and the critic, and return the step; the weights are `load_actor`'s to load."""
    state = torch.load(folder / STATE, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    if critic is not None:
        critic.load(folder)
    return int(state["step"])


def load_ahead(folder: Path) -> list[StepBatch]:
    """Return the batches that were sampled ahead of the checkpoint's step, the next one's first."""
    return load_sampled(folder / AHEAD) if (folder / AHEAD).exists() else []
