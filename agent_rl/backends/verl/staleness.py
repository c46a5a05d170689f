"""Staleness: how old the tokens of a batch are, checked against what was promised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agent_rl.algorithms.mismatch import policy_version_histogram
from agent_rl.types import Episode


def check_staleness(episodes: Sequence[Episode], version: int, limit: int) -> dict[str, float]:
    """Return the shares of the sampled tokens by staleness, as `policy_version_histogram` names them.

    Args:
        episodes: what is about to be trained on.
        version: of the weights that are about to be updated.
        limit: the staleness that no token may exceed.

    Raises:
        RuntimeError: if one does; it names the episode.
    """
    versions = [
        (torch.from_numpy(trajectory.policy_versions[trajectory.loss_mask].astype("int64")), episode.id)
        for episode in episodes
        for trajectory in episode.trajectories
    ]
    for found, episode in versions:
        if len(found) and version - int(found.min()) > limit:
            raise RuntimeError(
                f"episode {episode} has a token that version {int(found.min())} of the weights sampled, and version "
                f"{version} is about to be updated with it: that is older than the promised staleness of {limit}"
            )
    return policy_version_histogram(torch.cat([found for found, _ in versions]), version) if versions else {}
