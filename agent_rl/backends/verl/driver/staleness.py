"""Staleness: how old the tokens of a batch are, checked against what was promised."""

from __future__ import annotations

from collections.abc import Sequence

from agent_rl.core.episode import Episode


def check_staleness(episodes: Sequence[Episode], version: int, limit: int) -> None:
    """Check that no sampled token is older than promised.

    Args:
        episodes: what is about to be trained on.
        version: of the weights that are about to be updated.
        limit: the staleness that no token may exceed.

    Raises:
        RuntimeError: if one does; it names the episode.
    """
    for episode in episodes:
        for trajectory in episode.trajectories:
            sampled = trajectory.policy_versions[trajectory.loss_mask]
            if len(sampled) and version - int(sampled.min()) > limit:
                raise RuntimeError(
                    f"episode {episode.id} has a token that version {int(sampled.min())} of the weights sampled, and "
                    f"version {version} is about to be updated with it: that is older than the promised staleness of "
                    f"{limit}"
                )
