"""Advantages: how much better an episode did than was to be expected."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

EPSILON = 1e-6


def group_relative(rewards: Sequence[float | None], groups: Sequence[str], *, std: bool = True) -> list[float | None]:
    """GRPO: reward minus the mean of its group, divided by the group's standard deviation (Shao et al. 2024, eq. 3).

    An episode that is not scored (None) has no advantage and no part in its group's mean. A group with a single scored
    episode, or with equal rewards, has advantage 0: there is nothing to compare with.

    Args:
        rewards: one per episode; None for one that is not scored.
        groups: which episodes belong together, one id per episode.
        std: divide by the standard deviation (Bessel-corrected, as in the reference implementations) plus 1e-6; False
            is the unnormalised form of Dr. GRPO (Liu et al. 2025).

    Returns:
        One advantage per episode; None where the reward is None.
    """
    members: dict[str, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            members[group].append(reward)
    # clamped: rounding must not carry the mean of equal rewards past them, an advantage of 0 is exactly 0
    mean = {g: min(max(math.fsum(rs) / len(rs), min(rs)), max(rs)) for g, rs in members.items()}

    def scale(group: str) -> float:
        rs = members[group]
        if not std or len(rs) == 1:
            return 1.0
        return math.sqrt(math.fsum((r - mean[group]) ** 2 for r in rs) / (len(rs) - 1)) + EPSILON

    scales = {g: scale(g) for g in members}
    return [None if r is None else (r - mean[g]) / scales[g] for r, g in zip(rewards, groups, strict=True)]
