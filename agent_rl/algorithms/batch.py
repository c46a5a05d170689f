"""Batch: trajectories padded to tensors, and the counts that make a loss independent of how the batch is cut up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import BoolArray, ExpertArray, FloatArray, IntArray, Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, ready to train on; every array has the trajectory's length T."""

    token_ids: IntArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    """0 where `loss_mask` is False, so that no NaN can reach a sum."""
    rewards: FloatArray
    """What each turn earned, on its last sampled token."""
    policy_versions: IntArray
    """-1 where no token was sampled."""
    turns: IntArray
    sources: IntArray
    """An index into the members of `Source`."""
    episode: int
    """The place of its episode among those of the step."""
    episode_id: str
    group_id: str
    routed_experts: ExpertArray | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right to a common length `T`. Position `t` of every array describes token `t`.

    The first half is what was sampled; the second half is filled in on the way to the loss.
    """

    token_ids: Tensor
    """int64 `[B, T]`."""
    loss_mask: Tensor
    """bool `[B, T]`: True where the policy sampled the token."""
    rollout_logprobs: Tensor
    """float32 `[B, T]`, in nats, under the distribution that was sampled from (mu); 0 outside the mask."""
    rewards: Tensor
    """float32 `[B, T]`: what each turn earned, on its last sampled token; 0 elsewhere."""
    turns: Tensor
    """int64 `[B, T]`: the turn of each token; -1 for padding."""
    versions: Tensor
    """int64 `[B, T]`: the version of the weights that sampled it; -1 outside the mask."""
    sources: Tensor
    """int64 `[B, T]`: who wrote each token, an index into `types.Source`; -1 for padding."""
    routed_experts: Tensor | None
    """Integers `[B, T, layers, top_k]`: where the rollout's router sent each input position; -1 where not known."""
    lengths: Tensor
    """int64 `[B]`."""
    episode: Tensor
    """int64 `[B]`: which episode of the step a row belongs to."""
    group: Tensor
    """int64 `[B]`: that episode's group, numbered as in the `Experience`; -1 until weighed."""
    old_logprobs: Tensor
    """float32 `[B, T]`, under the proximal policy (old); the rollout's until somebody computes them."""
    reference_logprobs: Tensor
    """float32 `[B, T]`, under the policy that a KL penalty keeps close to; the rollout's until computed."""
    sum_pi_squared: Tensor
    """float32 `[B, T]`: of the distributions that the tokens came from, under old; 0 until computed."""
    old_experts: Tensor | None
    """Like `routed_experts`: where old's own router sends each input position; None until computed."""
    values: Tensor
    """float32 `[B, T]`: the critic's, of the state before each token; 0 without a critic."""
    returns: Tensor
    """float32 `[B, T]`: what the critic is trained towards; 0 without one."""
    valued: Tensor
    """bool `[B, T]`: where the critic is trained; nowhere without one."""
    advantages: Tensor
    """float32 `[B, T]`; 0 outside the mask."""
    weights: Tensor
    """float32 `[B, T]`: what a token's loss is multiplied with; 0 for what is not trained on."""
    counted: Tensor
    """bool `[B, T]`: the tokens that the denominators count."""
    prompt_shares: Tensor
    """float32 `[B]`: what each counted token of a row counts in a mean over prompts; 0 until computed."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def rows(self, indices: Sequence[int]) -> Batch:
        """Return some rows, with the padding that they don't need cut off."""
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.lengths.device)
        width = int(self.lengths[index].max()) if len(indices) else 0
        return self._map(lambda x: x[index][:, :width] if x.dim() > 1 else x[index])

    def cut(self, token_budget: int) -> list[Batch]:
        """Cut into micro-batches as `cut_rows` says."""
        return [self.rows(rows) for rows in self.cut_rows(token_budget)]

    def cut_rows(self, token_budget: int) -> list[list[int]]:
        """Return the rows of micro-batches of at most `token_budget` padded tokens, similar lengths together.

        A row longer than the budget gets a micro-batch of its own: nothing is dropped or shortened.
        """
        lengths = self.lengths.tolist()
        cuts: list[list[int]] = []
        for row in sorted(range(len(self)), key=lambda r: -lengths[r]):
            if cuts and (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] <= token_budget:
                cuts[-1].append(row)
            else:
                cuts.append([row])
        return cuts

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda x: x.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: None if x is None else change(x) for name, x in arrays.items()}
        return Batch(**changed)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the *whole* batch, so that the losses of its micro-batches add up to the loss of the batch."""

    tokens: int
    """Counted tokens."""
    sequences: int
    """Rows with at least one counted token."""
    valued: int = 1
    """Tokens at which the critic is trained."""

    @classmethod
    def of(cls, counted: Tensor, valued: Tensor | None = None) -> Denominators:
        """Count masks `[B, T]`; at least 1 each, so that an empty batch has loss 0."""
        found = 0 if valued is None else int(valued.sum())
        return cls(max(1, int(counted.sum())), max(1, int(counted.any(-1).sum())), max(1, found))


def to_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Turn episodes into samples, one per trajectory that the policy sampled tokens of.

    A turn's reward goes on the last sampled token of that turn, one of the whole episode on its very last: none falls
    on a token that is not trained on. What a fork repeats of its parent is sampled there, not here. A component that
    is not scored counts as 0; whether its episode is trained on at all, the scores say.
    """
    samples = []
    for index, episode in enumerate(episodes):
        rows = [(t, mask) for t in episode.trajectories if (mask := _own(t)).any()]
        earned = _earned(episode, rows)
        for (trajectory, mask), rewards in zip(rows, earned, strict=True):
            samples.append(
                Sample(
                    token_ids=trajectory.token_ids,
                    loss_mask=mask,
                    rollout_logprobs=np.where(mask, trajectory.logprobs, np.float32(0)),
                    rewards=rewards,
                    policy_versions=np.where(mask, trajectory.policy_versions, -1).astype(np.int32),
                    turns=trajectory.turns,
                    sources=trajectory.sources,
                    episode=index,
                    episode_id=episode.id,
                    group_id=episode.group_id,
                    routed_experts=trajectory.routed_experts,
                )
            )
    return samples


_Rows = list[tuple[Trajectory, BoolArray]]


def _own(trajectory: Trajectory) -> BoolArray:
    mask = trajectory.loss_mask
    if trajectory.forked_from is not None:
        mask[: trajectory.forked_from.position] = False
    return mask


def _earned(episode: Episode, rows: _Rows) -> list[FloatArray]:
    """Lay the episode's rewards out over its rows."""
    earned = [np.zeros(len(mask), np.float32) for _, mask in rows]
    last: dict[int | None, tuple[int, int]] = {}  # turn → the row and place of its last sampled token
    for row, (trajectory, mask) in enumerate(rows):
        places = np.flatnonzero(mask)
        turns = trajectory.turns[places]
        for end in np.flatnonzero(np.diff(turns, append=-1)):  # where a run of the same turn ends
            last[int(turns[end])] = last[None] = (row, int(places[end]))
    for reward in episode.rewards if rows else ():
        if reward.value is not None and reward.weight != 0:
            row, token = last.get(reward.turn, last[None])
            earned[row][token] += reward.value * reward.weight
    return earned


def collate(samples: Sequence[Sample], pad_id: int = 0) -> Batch:
    """Pad samples to tensors. Until somebody knows better, old is mu, advantages are 0 and every token weighs 1.

    Raises:
        ValueError: if there are no samples, or only some of them have routed experts.
    """
    if not samples:
        raise ValueError("there are no samples to collate: check that an episode has sampled tokens first")
    width = max(len(s.token_ids) for s in samples)

    def padded(arrays: Sequence[np.ndarray], fill: int, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(arrays), width, *arrays[0].shape[1:]), fill, dtype=dtype)
        for row, array in zip(out, arrays, strict=True):
            row[: len(array)] = torch.from_numpy(array)
        return out

    mask = padded([s.loss_mask for s in samples], 0, torch.bool)
    mu = padded([s.rollout_logprobs for s in samples], 0, torch.float32)
    routes = [s.routed_experts for s in samples if s.routed_experts is not None]
    if routes and len(routes) < len(samples):
        raise ValueError(
            f"{len(samples) - len(routes)} of {len(samples)} samples have no routed experts, the others do"
        )
    return Batch(
        token_ids=padded([s.token_ids for s in samples], pad_id, torch.int64),
        loss_mask=mask,
        rollout_logprobs=mu,
        rewards=padded([s.rewards for s in samples], 0, torch.float32),
        turns=padded([s.turns for s in samples], -1, torch.int64),
        versions=padded([s.policy_versions for s in samples], -1, torch.int64),
        sources=padded([s.sources for s in samples], -1, torch.int64),
        routed_experts=padded(routes, -1, torch.from_numpy(np.empty(0, np.result_type(*routes))).dtype)
        if routes
        else None,
        lengths=torch.tensor([len(s.token_ids) for s in samples]),
        episode=torch.tensor([s.episode for s in samples]),
        group=torch.full((len(samples),), -1),
        old_logprobs=mu,
        reference_logprobs=mu,
        sum_pi_squared=torch.zeros_like(mu),
        old_experts=None,
        values=torch.zeros_like(mu),
        returns=torch.zeros_like(mu),
        valued=torch.zeros_like(mask),
        advantages=torch.zeros_like(mu),
        weights=mask.float(),
        counted=mask,
        prompt_shares=torch.zeros(len(samples)),
    )
