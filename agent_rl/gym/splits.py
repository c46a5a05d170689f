"""Splits of generated tasks: a task belongs to the split that a hash of its text names."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np

from agent_rl.core.messages import Task
from agent_rl.seeds import Stream, rng


@functools.cache
def part_of(text: str) -> str:
    """Return the part of the data that a task's text belongs to: eight in ten to train, one each to dev and test."""
    digest = hashlib.blake2b(text.encode(), digest_size=2).digest()
    return {0: "test", 1: "dev"}.get(int.from_bytes(digest, "big") % 10, "train")


def draw_task(split: str, index: int, draw: Callable[[np.random.Generator], Task | None], text: str) -> Task:
    """Draw tasks until one belongs to a split; the same for the same split and index.

    Args:
        split: "train", "dev" or "test"; behind a hyphen there may be a kind of tasks, as in "test-hard".
        index: of the task in its split.
        draw: returns a task, or None to draw again.
        text: the key of the task's text, which decides on the part.
    """
    generator = rng(Stream.TASKS, *split.encode(), index)
    part = split.partition("-")[0]
    while True:
        task = draw(generator)
        if task is not None and part_of(str(task[text])) == part:
            return task
