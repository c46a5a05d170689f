"""Ways to cut an episode into rows: it forks, goes on in another context, or a sub-agent plays a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WIDTH, TURN = 9, 3
"""The tokens of an episode that is cut, and of each of its turns."""


class Pieces(NamedTuple):
    """How an episode is cut into rows."""

    after: Sequence[int] = ()
    """Before which tokens it forks."""
    opening: int | None = None
    """How many other tokens a fork's context begins with, in place of what came before it; None repeats that."""
    agent: tuple[int, int] | None = None
    """The tokens that a sub-agent wrote behind an opening; its caller's rows go on without them."""

    @classmethod
    def drawn(cls, random: np.random.Generator) -> Pieces:
        """Draw one: forks, half of the time with other contexts, half of the time with a sub-agent."""
        end = int(random.integers(2, WIDTH + 1))
        agent = (int(random.integers(1, end)), end) if random.random() < 0.5 else None
        free = [at for at in range(2, WIDTH) if agent is None or not agent[0] <= at <= end]
        after = random.choice(free, min(len(free), int(random.integers(0, 5))), replace=False)
        return cls(sorted(after.tolist()), int(random.integers(1, 4)) if random.random() < 0.5 else None, agent)
