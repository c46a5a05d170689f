"""The stages of a batch: rows that were sampled, scored by models, and weighted for the loss; and its denominators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import BoolArray, ExpertArray, FloatArray, IntArray, Trajectory
from agent_rl.moe.agreement import RouteAgreement


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
    routed_experts: ExpertArray | None = None


PADDING, FAIR = 0.03, 0.125
"""The most padding of a micro-batch that is not small, and the part of the token budget from which on it is not."""


class Stage:
    """Rows at one stage on their way to the loss; each stage holds the one before it, and adds what became known."""

    __slots__ = ()

    if TYPE_CHECKING:  # every stage has it, as a field or a property

        @property
        def rows(self) -> Rows:
            """What was sampled."""

    def __len__(self) -> int:
        return len(self.rows.lengths)

    def select(self, indices: Sequence[int] | Tensor, device: torch.device | None = None) -> Self:
        """Return some rows, with the padding that they don't need cut off, on a device."""
        lengths = self.rows.lengths
        index = torch.as_tensor(indices, dtype=torch.int64, device=lengths.device)
        return _select(self, index, int(lengths[index].max()) if len(index) else 0, device)

    def cut(self, token_budget: int, device: torch.device | None = None) -> list[Self]:
        """Cut into micro-batches as `cut_rows` says, on a device."""
        return list(map(partial(self.select, device=device), self.cut_rows(token_budget)))

    def cut_rows(self, token_budget: int) -> list[list[int]]:
        """Return the rows of micro-batches of at most `token_budget` padded tokens, similar lengths together.

        One that has a fair part of the budget already takes no row that would make more than `PADDING` of it padding. A
        row longer than the budget gets a micro-batch of its own: nothing is dropped or shortened.
        """
        lengths, cuts, tokens = self.rows.lengths.tolist(), list[list[int]](), 0
        for row in self.rows.lengths.argsort(descending=True, stable=True).tolist():
            padded = (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] if cuts else token_budget + 1
            filled = tokens + lengths[row]
            if padded <= token_budget and (tokens < FAIR * token_budget or padded - filled <= PADDING * padded):
                cuts[-1].append(row)
                tokens = filled
            else:
                cuts.append([row])
                tokens = lengths[row]
        return cuts


S = TypeVar("S")


def _select(stage: S, index: Tensor, width: int, device: torch.device | None) -> S:
    """Index every tensor of a dataclass by row, and those of tokens to a width; of dataclasses in it, too."""
    chosen: dict[str, object] = {}
    for name in stage.__slots__:  # type: ignore[attr-defined]
        part = getattr(stage, name)
        if isinstance(part, Tensor):
            chosen[name] = (part[index][:, :width] if part.dim() > 1 else part[index]).to(device)
        elif isinstance(part, RouteAgreement):
            chosen[name] = part.select(index, width)
        else:
            chosen[name] = None if part is None else _select(part, index, width, device)
    return type(stage)(**chosen)


@dataclass(frozen=True, slots=True)
class Rows(Stage):
    """What was sampled, padded on the right to a common length `T`; position `t` of every array describes token `t`."""

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
    """int64 `[B, T]`: who wrote each token, an index into `Source`; -1 for padding."""
    routed_experts: Tensor | None
    """Integers `[B, T, layers, top_k]`: where the rollout's router sent each input position; -1 where not known."""
    lengths: Tensor
    """int64 `[B]`."""
    episode: Tensor
    """int64 `[B]`: which episode of the step a row belongs to."""

    @property
    def rows(self) -> Rows:
        """These rows."""
        return self


@dataclass(frozen=True, slots=True)
class ScoredRows(Stage):
    """Rows with the scores of their tokens; None for a score that was not computed."""

    rows: Rows
    old_logprobs: Tensor
    """float32 `[B, T]`, under the proximal policy (old); with `proximal=rollout` the rollout's own."""
    reference_logprobs: Tensor | None = None
    """float32 `[B, T]`, under the policy that the run started from."""
    values: Tensor | None = None
    """float32 `[B, T]`: the critic's, of the state before each token."""
    sum_pi_squared: Tensor | None = None
    """float32 `[B, T]`: the sum of the squared probabilities that old gave at each token's position."""
    old_experts: Tensor | None = None
    """Like `routed_experts`: where old's own router sends each input position."""
    measured_agreement: RouteAgreement | None = None
    """How far both agree, where their routes themselves are elsewhere: on verl, with its workers."""

    @property
    def agreement(self) -> RouteAgreement | None:
        """How far the routes of rollout and old agree; None if either's are not known."""
        rollout, old = self.rows.routed_experts, self.old_experts
        if rollout is None or old is None:
            return self.measured_agreement
        return RouteAgreement.of(rollout, old, self.rows.loss_mask)


@dataclass(frozen=True, slots=True)
class CriticTargets:
    """What the value loss reads; all `[B, T]`."""

    values: Tensor
    """float32: the critic's, when the advantages were computed."""
    returns: Tensor
    """float32: what the critic is trained towards; 0 where it is not."""
    valued: Tensor
    """bool: where the critic is trained."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of the policy's loss on a micro-batch, as sent to verl's workers; `[B, T]` but for shares."""

    loss_mask: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    counted: Tensor
    prompt_shares: Tensor | None
    """float32 `[B]`."""


@dataclass(frozen=True, slots=True)
class WeightedRows(Stage):
    """Scored rows with their advantages, weights and denominators: ready for their loss."""

    scored: ScoredRows
    advantages: Tensor
    """float32 `[B, T]`; 0 outside the mask."""
    weights: Tensor
    """float32 `[B, T]`: what a token's loss is multiplied with; 0 for what is not trained on."""
    counted: Tensor
    """bool `[B, T]`: the tokens that the denominators count."""
    group: Tensor
    """int64 `[B]`: the group of the row's episode, numbered as in the `Experience`."""
    prompt_shares: Tensor | None = None
    """float32 `[B]`: what each counted token of a row counts in a mean over prompts; None unless it is read."""
    critic: CriticTargets | None = None
    """None without a critic."""

    @property
    def rows(self) -> Rows:
        """What was sampled."""
        return self.scored.rows

    @property
    def inputs(self) -> LossInputs:
        """What `Algorithm.loss` reads."""
        rows, scored = self.scored.rows, self.scored
        return LossInputs(
            loss_mask=rows.loss_mask,
            rollout_logprobs=rows.rollout_logprobs,
            old_logprobs=scored.old_logprobs,
            reference_logprobs=scored.reference_logprobs,
            advantages=self.advantages,
            weights=self.weights,
            counted=self.counted,
            prompt_shares=self.prompt_shares,
        )


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

    A turn's reward is put on the last sampled token of that turn, one of the whole episode on its very last: none falls
    on a token that is not trained on. What a fork repeats of its parent is sampled there, not here. A component that
    is not scored counts as 0; the scores decide whether its episode is trained on at all.
    """
    samples = []
    for index, episode in enumerate(episodes):
        rows = rows_of(episode)
        earned = _earned(episode, rows)
        for (_, trajectory, mask), rewards in zip(rows, earned, strict=True):
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
                    routed_experts=trajectory.routed_experts,
                )
            )
    return samples


def rows_of(episode: Episode) -> list[tuple[int, Trajectory, BoolArray]]:
    """Return the trajectories that become rows, each with its number and the mask of what was sampled in it."""
    return [(n, t, mask) for n, t in enumerate(episode.trajectories) if (mask := t.own_loss_mask).any()]


def _earned(episode: Episode, rows: Sequence[tuple[int, Trajectory, BoolArray]]) -> list[FloatArray]:
    """Lay the episode's rewards out over its rows."""
    earned = [np.zeros(len(mask), np.float32) for _, _, mask in rows]
    last: dict[int | None, tuple[int, int]] = {}  # turn → the row and place of its last sampled token
    for row, (_, trajectory, mask) in enumerate(rows):
        places = np.flatnonzero(mask)
        turns = trajectory.turns[places]
        for end in np.flatnonzero(np.diff(turns, append=-1)):  # where a run of the same turn ends
            last[int(turns[end])] = last[None] = (row, int(places[end]))
    for reward in episode.rewards if rows else ():
        if reward.value is not None and reward.weight != 0:
            row, token = last.get(reward.turn, last[None])
            earned[row][token] += reward.value * reward.weight
    return earned


def collate(samples: Sequence[Sample], pad_id: int = 0) -> Rows:
    """Pad samples to tensors; without samples there are no rows. Routed experts are those of all samples or of none."""
    width = max((len(s.token_ids) for s in samples), default=0)

    def padded(arrays: Sequence[np.ndarray], fill: int, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(arrays), width, *(arrays[0].shape[1:] if arrays else ())), fill, dtype=dtype)
        for row, array in zip(out, arrays, strict=True):
            row[: len(array)] = torch.from_numpy(array)
        return out

    routes = [s.routed_experts for s in samples if s.routed_experts is not None]
    if routes and len(routes) < len(samples):
        raise ValueError(
            f"{len(samples) - len(routes)} of {len(samples)} samples have no routed experts, the others do"
        )
    return Rows(
        token_ids=padded([s.token_ids for s in samples], pad_id, torch.int64),
        loss_mask=padded([s.loss_mask for s in samples], 0, torch.bool),
        rollout_logprobs=padded([s.rollout_logprobs for s in samples], 0, torch.float32),
        rewards=padded([s.rewards for s in samples], 0, torch.float32),
        turns=padded([s.turns for s in samples], -1, torch.int64),
        versions=padded([s.policy_versions for s in samples], -1, torch.int64),
        sources=padded([s.sources for s in samples], -1, torch.int64),
        routed_experts=padded(routes, -1, torch.from_numpy(np.empty(0, np.result_type(*routes))).dtype)
        if routes
        else None,
        lengths=torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64),
        episode=torch.tensor([s.episode for s in samples], dtype=torch.int64),
    )
