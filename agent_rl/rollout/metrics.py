"""Metrics that trajectories tell: how often a rendering was no append, and how often a reply was interrupted."""

from __future__ import annotations

from collections.abc import Sequence

from agent_rl.core.episode import Episode
from agent_rl.policy.interruption import interruptions


def trajectory_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Count what goes on inside trajectories.

    Returns:
        `rollout/forks`: trajectories beyond the first, per episode; 0 as long as every message could be appended.
        `rollout/interrupted`: the share of replies that were cut short with given tokens.
    """
    forks = sum(max(0, len(e.trajectories) - 1) for e in episodes)
    cut = sum(interruptions(t) for e in episodes for t in e.trajectories)
    replies = sum(e.turns for e in episodes)
    return {"rollout/forks": forks / max(1, len(episodes)), "rollout/interrupted": cut / max(1, replies)}
