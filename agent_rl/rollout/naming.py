"""Names: the ids and seeds of a run's episodes, the same on every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_rl.core.episode import Origin, Purpose
from agent_rl.core.messages import Task
from agent_rl.gym.tasks import EVALUATION_SEED, episode_seed

EVALUATION = "evaluation"
"""The column of verl's rows that tells those of an evaluation from those of training."""


def origin_of(row: Mapping[str, Any], *, greedy: bool = False) -> Origin:
    """Return the origin of the episode of one of verl's rows.

    Args:
        row: what verl hands to an agent loop: a row of `TaskDataset`, with `global_steps` and `session_id`.
        greedy: whether the likeliest tokens are taken.
    """
    purpose: Purpose = "eval" if row[EVALUATION] else "train"
    sample = 0 if greedy else int(row["session_id"])
    return Origin(purpose, str(row["split"]), int(row["global_steps"]), sample, greedy)


def names_of(origin: Origin, task: int, *, sampling: str = "", digits: int = 3) -> tuple[str, str]:
    """Return the group id and the id of an episode, for people to read.

    A training episode is `train-<step>-<task>-<sample>`, whatever its split is called, in a group of its task; a greedy
    one has `greedy` for its number. One of an evaluation is `<split>-<step>-<sampling>-<task>`, all in one group.

    Args:
        origin: why it is run.
        task: the number of its task, in the step or evaluation.
        sampling: how an evaluation samples; "sampled" or "greedy" if left out.
        digits: of the task's number in a training episode.
    """
    step, sample = origin.step or 0, f"{origin.sample:02d}"
    if origin.purpose == "train":
        group = f"train-{step:05d}-{task:0{digits}d}"
        return group, f"{group}-{'greedy' if origin.greedy else sample}"
    group = f"{origin.split}-{step:05d}-{sampling or ('greedy' if origin.greedy else 'sampled')}"
    return group, f"{group}-{task:04d}" + (f"-{sample}" if origin.sample else "")


def seed_of(origin: Origin, task: Task, run_seed: int, again: int = 0) -> int:
    """Return the seed of an episode.

    In training it depends on the step and on how often the task came before, as a finite split has a task again, maybe
    in the same step. Every evaluation of a task has the same, so that two can be compared; a greedy episode has that of
    its group's first, so that it plays in the same world.

    Args:
        origin: why it is run.
        task: what it is about.
        run_seed: the run's.
        again: how often the run took the task before, see `TaskStream.again`.
    """
    rounds = run_seed * 1_000_003 + (origin.step or 0) + again * 2**64
    if origin.purpose == "eval":
        rounds = EVALUATION_SEED
    return episode_seed(rounds, task, 0 if origin.greedy else origin.sample)
