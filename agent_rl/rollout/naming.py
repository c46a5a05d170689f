"""Names: ids, origins and seeds of a verl run's episodes, as on the embedded backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_rl.core.episode import Origin, Purpose
from agent_rl.core.messages import Task
from agent_rl.gym.tasks import EVALUATION_SEED, episode_seed

EVALUATION = "evaluation"
"""The column that tells the rows of an evaluation from those of training."""


def origin_of(row: Mapping[str, Any], *, greedy: bool = False) -> Origin:
    """Return why a row's episode is run; arguments as of `names_of`."""
    purpose: Purpose = "eval" if row[EVALUATION] else "train"
    sample = 0 if greedy else int(row["session_id"])
    return Origin(purpose, str(row["split"]), int(row["global_steps"]), sample, greedy)


def names_of(row: Mapping[str, Any], *, greedy: bool = False) -> tuple[str, str]:
    """Return the group id and the id of a row's episode, for people to read.

    A training episode is `train-<step>-<task>-<sample>`, whatever its split is called, in a group of its task; the
    one that the others are compared with, if an algorithm does that, has `greedy` for its number. One of
    an evaluation is `<split>-<step>-sampled-<task>`, or `greedy` for `sampled` at temperature 0, all in one group.

    Args:
        row: what verl hands to an agent loop: a row of `TaskDataset`, with `global_steps` and `session_id`.
        greedy: whether the likeliest tokens are taken.
    """
    step, index, session = int(row["global_steps"]), int(row["index"]), int(row["session_id"])
    if not row[EVALUATION]:
        group = f"train-{step:05d}-{index:07d}"
        return group, f"{group}-greedy" if greedy else f"{group}-{session:02d}"
    group = f"{row['split']}-{step:05d}-{'greedy' if greedy else 'sampled'}"
    return group, f"{group}-{index:04d}" + (f"-{session:02d}" if session else "")


def seed_of(row: Mapping[str, Any], task: Task, run_seed: int, *, greedy: bool = False) -> int:
    """Return the seed of a row's episode.

    Every evaluation of a task has the same, so that two can be compared; a greedy episode that of its group's first,
    so that it plays in the same world.
    """
    rounds = EVALUATION_SEED if row[EVALUATION] else run_seed * 1_000_003 + int(row["global_steps"])
    return episode_seed(rounds, task, 0 if greedy else int(row["session_id"]))
