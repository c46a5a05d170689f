"""Seeds: every stream of random numbers, by name, so that no two uses share one by accident."""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np


@unique
class Stream(IntEnum):
    """What random numbers are drawn for. A stream's number is part of its seed: changing it changes results."""

    DEMONSTRATION = 1
    """The mistakes of `Env.demonstrate`."""
    WARM_START = 2
    """The order of demonstrations."""
    SHUFFLED_REWARDS = 3
    """Which episode gets which reward in the control run."""
    STATE_VALUES = 4
    """Which states are valued, and the seeds of their continuations."""
    SHUFFLED_CONTINUATIONS = 5
    """Which continuation gets which reward in the control run."""
    STORED_GROUPS = 6
    """The order of stored groups."""
    INTERRUPTION = 7
    """After how many tokens a reply is interrupted."""


def rng(stream: Stream, *key: int) -> np.random.Generator:
    """Return the generator of a stream; the same for the same key.

    Args:
        stream: what it is drawn for.
        key: non-negative numbers, such as the run's seed and the step.
    """
    return np.random.default_rng([stream, *key])
