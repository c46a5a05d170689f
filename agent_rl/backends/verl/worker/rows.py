"""Rows: how an episode travels through verl, and how it comes back with every token in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.algorithms.batch import to_samples
from agent_rl.backends.verl.worker.branches import SNAPSHOTS, pack_snapshots, with_snapshots
from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON
from agent_rl.core.trajectory import ExpertArray
from agent_rl.store.codec import dump_line, load_line

EPISODE = "agent_rl_episode"
"""The extra field that holds the whole episode, with its first row."""


@dataclass(frozen=True, slots=True)
class Row:
    """What verl trains on: one trajectory, cut at the first token that the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    routed_experts: ExpertArray | None
    versions: tuple[int, int]
    """The oldest and the newest weights that sampled it."""
    extra_fields: dict[str, JSON]


def rows_of(episode: Episode) -> list[Row]:
    """Return an episode's rows: one per trajectory with tokens of its own, or a blank one if there are none.

    The blank row has nothing to train on. It is there so that verl's bookkeeping, which counts rows, sees the episode,
    and the driver gets to store it.
    """
    found = []
    for sample in to_samples([episode]):
        start = int(np.argmax(sample.loss_mask))
        versions = sample.policy_versions[sample.loss_mask]
        found.append(
            Row(
                prompt_ids=sample.token_ids[:start].tolist(),
                response_ids=sample.token_ids[start:].tolist(),
                response_mask=sample.loss_mask[start:].astype(int).tolist(),
                response_logprobs=sample.rollout_logprobs[start:].tolist(),
                routed_experts=sample.routed_experts,
                versions=(int(versions.min()), int(versions.max())),
                extra_fields={},
            )
        )
    rows = found or [Row([0], [0], [0], [0.0], None, (0, 0), {})]
    rows[0].extra_fields[EPISODE] = dump_line(episode).decode()
    if episode.snapshots:
        rows[0].extra_fields[SNAPSHOTS] = pack_snapshots(episode)
    return rows


def episode_of(extra_fields: dict[str, JSON]) -> Episode | None:
    """Return the episode that a row carries, its snapshots packed; only an episode's first row does."""
    line = extra_fields.get(EPISODE)
    return with_snapshots(load_line(str(line).encode()), extra_fields) if line is not None else None


def rewards_of(episode: Episode) -> dict[str, float]:
    """Return what verl reports of an episode: success, and each component that was scored."""
    scored = {r.name: float(r.value) for r in episode.rewards if r.value is not None}
    return {"success": float(bool(episode.success)), "failed": float(not episode.trainable), **scored}


def check_row(episode: Episode, number: int, what: str, sent: Sequence[int], received: Sequence[int]) -> None:
    """Compare a row that verl is about to train on with the trajectory that was sampled.

    Args:
        episode: the row's.
        number: which of the episode's rows it is.
        what: is compared: "ids", of every token, or "mask", of the response's: 1 where the policy sampled.
        sent: what the trajectory says.
        received: what verl has.

    Raises:
        RuntimeError: if they differ anywhere.
    """
    if list(sent) != list(received):
        pairs = enumerate(zip(sent, received, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(sent), len(received)))
        raise RuntimeError(
            f"row {number} of episode {episode.id} came back from verl changed at token {at} of its {what} "
            f"({len(sent)} sent, {len(received)} received): it must not be trained on"
        )
