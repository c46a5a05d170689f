"""Ways to cut an episode into rows: it forks, goes on in another context, or a sub-agent plays a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WIDTH, TURN = 9, 3
"""The tokens of an episode that is cut, and of each of its turns."""
SAMPLED = [[1, 2, 4], [2, 5, 7], [3, 4, 5, 8], [1, 6], [1, 2, 3], [4, 7], [2, 3, 5, 6, 8], [5]]
"""Where eight episodes, in two groups of four, have sampled tokens."""
SCORES = [1.0, 0.0, 0.5, 0.25, 2.0, 1.5, 0.75, 3.0]


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
