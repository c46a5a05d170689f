"""From episodes to rows: a sample for each trajectory that was sampled, and samples laid out flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agent_rl.algorithms.batch import Rows
from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import BoolArray, ExpertArray, FloatArray, IntArray, Trajectory

Rewards: TypeAlias = npt.NDArray[np.float64]
"""In float64, as 0.2 + 0.7 is not 0.1 + 0.8 in float32."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, ready to train on; every array has the trajectory's length T."""

    token_ids: IntArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    """0 where `loss_mask` is False, so that no NaN can reach a sum."""
    rewards: Rewards
    """What each turn earned, on its last sampled token."""
    policy_versions: IntArray
    """-1 where no token was sampled."""
    turns: IntArray
    moments: IntArray
    """When each token came, among those of all trajectories of its episode."""
    sources: IntArray
    """An index into the members of `Source`."""
    episode: int
    """The place of its episode among those of the step."""
    routed_experts: ExpertArray | None = None


def to_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Turn episodes into samples, one per trajectory that the policy sampled tokens of.

    A turn's reward is put on the last sampled token of that turn, one of the whole episode on its very last: none falls
    on a token that is not trained on. What a fork repeats of its parent is sampled there, not here. A component that
    is not scored counts as 0; the scores decide whether its episode is trained on at all.
    """
    samples = []
    for index, episode in enumerate(episodes):
        rows, moments = rows_of(episode), _moments(episode.trajectories)
        earned = _earned(episode, rows, moments)
        for (number, trajectory, mask), rewards in zip(rows, earned, strict=True):
            samples.append(
                Sample(
                    token_ids=trajectory.token_ids,
                    loss_mask=mask,
                    rollout_logprobs=np.where(mask, trajectory.logprobs, np.float32(0)),
                    rewards=rewards,
                    policy_versions=np.where(mask, trajectory.policy_versions, -1).astype(np.int32),
                    turns=trajectory.turns,
                    moments=moments[number],
                    sources=trajectory.sources,
                    episode=index,
                    routed_experts=trajectory.routed_experts,
                )
            )
    return samples


def rows_of(episode: Episode) -> list[tuple[int, Trajectory, BoolArray]]:
    """Return the trajectories that become rows, each with its number and the mask of what was sampled in it."""
    return [(n, t, mask) for n, t in enumerate(episode.trajectories) if (mask := t.own_loss_mask).any()]


def _moments(trajectories: Sequence[Trajectory]) -> list[IntArray]:
    """Return when each token came: one trajectory after the other, but a sub-agent's where its caller waited for it."""
    lengths = [len(trajectory) for trajectory in trajectories]
    ends = np.cumsum(lengths)[:-1]
    if not any(trajectory.is_delegated for trajectory in trajectories):
        return np.split(np.arange(sum(lengths), dtype=np.int32), ends)
    waits, keys = list[tuple[int, int] | None](), list[IntArray]()
    for number, trajectory in enumerate(trajectories):
        waits.append(wait := _wait(trajectory, trajectories, waits))
        place = np.arange(len(trajectory))
        of, after = (number, 2 * place + 1) if wait is None else (wait[0], 2 * wait[1])
        keys.append(np.stack(np.broadcast_arrays(place, number, after, of)))
    moments = np.empty(sum(lengths), np.int32)
    moments[np.lexsort(np.concatenate(keys, axis=1))] = np.arange(sum(lengths))
    return np.split(moments, ends)


def _wait(
    trajectory: Trajectory, trajectories: Sequence[Trajectory], waits: Sequence[tuple[int, int] | None]
) -> tuple[int, int] | None:
    """Return which trajectory waits for this one, after how many tokens; None where none does."""
    fork = trajectory.forked_from
    if fork is None or not fork.delegated:
        return None
    if fork.called_at is not None:
        return fork.parent, fork.called_at
    called = trajectory.spans[0].turn if trajectory.spans else 0  # as far as an earlier version's episodes say it
    return waits[fork.parent] or (fork.parent, int((trajectories[fork.parent].turns <= called).sum()))


def _earned(
    episode: Episode, rows: Sequence[tuple[int, Trajectory, BoolArray]], moments: Sequence[IntArray]
) -> list[Rewards]:
    """Lay the episode's rewards out over its rows."""
    earned = [np.zeros(len(mask)) for _, _, mask in rows]
    last: dict[int, tuple[int, int, int]] = {}  # turn → the moment, row and place of its last sampled token
    for row, (number, trajectory, mask) in enumerate(rows):
        places = np.flatnonzero(mask)
        turns = trajectory.turns[places]
        for end in np.flatnonzero(np.diff(turns, append=-1)):  # where a run of the same turn ends
            turn, found = int(turns[end]), (int(moments[number][places[end]]), row, int(places[end]))
            last[turn] = max(found, last.get(turn, found))
    for reward in episode.rewards if rows else ():
        if reward.value is not None and reward.weight != 0:
            _, row, token = last[reward.turn if reward.turn in last else max(last)]
            earned[row][token] += reward.value * reward.weight
    return earned


def collate(samples: Sequence[Sample]) -> Rows:
    """Lay samples out flat; without samples there are no rows. Routed experts are those of all samples or of none."""

    def flat(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(dtype) if arrays else torch.empty(0, dtype=dtype)

    routes = [s.routed_experts for s in samples if s.routed_experts is not None]
    if routes and len(routes) < len(samples):
        raise ValueError(
            f"{len(samples) - len(routes)} of {len(samples)} samples have no routed experts, the others do"
        )
    return Rows(
        token_ids=flat([s.token_ids for s in samples], torch.int64),
        loss_mask=flat([s.loss_mask for s in samples], torch.bool),
        rollout_logprobs=flat([s.rollout_logprobs for s in samples], torch.float32),
        rewards=flat([s.rewards for s in samples], torch.float64),
        turns=flat([s.turns for s in samples], torch.int64),
        moments=flat([s.moments for s in samples], torch.int64),
        versions=flat([s.policy_versions for s in samples], torch.int64),
        sources=flat([s.sources for s in samples], torch.int64),
        routed_experts=torch.from_numpy(np.concatenate(routes)) if routes else None,
        lengths=torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64),
        episode=torch.tensor([s.episode for s in samples], dtype=torch.int64),
    )
