"""The stages of a batch: rows that were sampled, scored by models, and weighted for the loss; and its denominators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import torch
from torch import Tensor

from agent_rl.grid import LINES, Grid, cut_lengths
from agent_rl.moe.agreement import RouteAgreement


class Stage:
    """Rows at one stage on their way to the loss; each stage holds the one before it, and adds what became known.

    The arrays of a batch's `N` tokens are flat, one row after another, so that a long row makes the others no longer.
    Those of a micro-batch, which `padded` and `cut` return, are `[B, T]`, padded on the right.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # every stage has it, as a field or a property

        @property
        def rows(self) -> Rows:
            """What was sampled."""

    def __len__(self) -> int:
        return len(self.rows.lengths)

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """Return some rows of a batch, flat."""
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.rows.lengths.device)
        places = self.rows.places(index)
        return _each(self, lambda name, x: x[index if name in OF_ROWS else places])

    def padded(self, indices: Sequence[int] | Tensor | None = None, device: torch.device | None = None) -> Self:
        """Return some rows of a batch, or all of them, as a micro-batch on a device."""
        indices = torch.arange(len(self)) if indices is None else indices
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.rows.lengths.device)
        grid = self.rows.grid(index)
        return _each(
            self,
            lambda name, x: (x[index] if name in OF_ROWS else grid.lay(x, -1 if name in UNKNOWN else 0)).to(device),
        )

    def cut(self, token_budget: int, device: torch.device | None = None) -> list[Self]:
        """Cut a batch into micro-batches as `cut_rows` says, on a device."""
        return [self.padded(rows, device) for rows in self.cut_rows(token_budget)]

    def cut_rows(self, token_budget: int) -> list[list[int]]:
        """Return the rows of micro-batches of at most `token_budget` padded tokens; see `cut_lengths`."""
        return cut_lengths(self.rows.lengths, token_budget)


OF_ROWS = frozenset({"lengths", "episode", "group", "prompt_shares", "sequence_tokens", "sequences", "shared", "known"})
"""The arrays that have a number per row; all others have one per token."""
UNKNOWN = frozenset({"turns", "versions", "sources", "routed_experts", "old_experts"})
"""The arrays that are -1 where there is nothing."""

S = TypeVar("S")


def _each(stage: S, change: Callable[[str, Tensor], Tensor]) -> S:
    """Change every tensor of a dataclass, and of the dataclasses in it."""
    changed: dict[str, object] = {}
    for name in stage.__slots__:  # type: ignore[attr-defined]
        part = getattr(stage, name)
        if part is None:
            changed[name] = None
        else:
            changed[name] = change(name, part) if isinstance(part, Tensor) else _each(part, change)
    return type(stage)(**changed)


@dataclass(frozen=True, slots=True)
class Rows(Stage):
    """What was sampled; position `t` of every array of tokens, `[N]` or `[B, T]`, describes token `t`."""

    token_ids: Tensor
    """int64."""
    loss_mask: Tensor
    """bool: True where the policy sampled the token."""
    rollout_logprobs: Tensor
    """float32, in nats, under the distribution that was sampled from (mu); 0 outside the mask."""
    rewards: Tensor
    """float64, in which sums that are equal but for their order stay so: what each turn earned, on its last sampled
    token; 0 elsewhere."""
    turns: Tensor
    """int64: the turn of each token; -1 for padding."""
    moments: Tensor
    """int64: when each token came, among those of its episode."""
    versions: Tensor
    """int64: the version of the weights that sampled it; -1 outside the mask."""
    sources: Tensor
    """int64: who wrote each token, an index into `Source`; -1 for padding."""
    routed_experts: Tensor | None
    """Integers `[N, layers, top_k]`: where the rollout's router sent each input position; -1 where not known."""
    lengths: Tensor
    """int64 `[B]`."""
    episode: Tensor
    """int64 `[B]`: which episode of the step a row belongs to. Those of one are neighbours, in their order."""

    @property
    def rows(self) -> Rows:
        """These rows."""
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Of the rows as one micro-batch."""
        return len(self.lengths), int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def starts(self) -> Tensor:
        """Where each row begins in the flat arrays, int64 `[B]`."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def row_of_token(self) -> Tensor:
        """The row of each token, int64 `[N]`."""
        return torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(self.lengths)

    @property
    def episode_of_token(self) -> Tensor:
        """The episode of each token, int64 `[N]`."""
        return self.episode.repeat_interleave(self.lengths)

    @property
    def in_time(self) -> Tensor:
        """Where the sampled tokens are in the flat arrays, each episode's as they came, int64 `[sampled]`.

        What a sub-agent sampled has a row after its caller's, which goes on when that is done.
        """
        sampled = torch.nonzero(self.loss_mask)[:, 0]
        episode, moment = self.episode_of_token[sampled], self.moments[sampled]
        is_next = torch.diff(episode, prepend=episode[:1]) != 0
        back = torch.diff(moment, prepend=moment[:1]) < 0
        if not (back & ~is_next).any():
            return sampled
        return sampled[(is_next.cumsum(0) * (moment.max() + 1) + moment).argsort()]

    def grid(self, index: Tensor | None = None) -> Grid:
        """Return the layout of some rows, int64 `[b]`, or of all, as a micro-batch."""
        starts, lengths = self.starts, self.lengths
        return Grid.of(starts, lengths) if index is None else Grid.of(starts[index], lengths[index])

    def places(self, index: Tensor) -> Tensor:
        """Return where the tokens of some rows are in the flat arrays, row by row."""
        lengths = self.lengths[index]
        moved = self.starts[index] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum()), device=lengths.device) + moved.repeat_interleave(lengths)

    def sum(self, flat: Tensor) -> Tensor:
        """Return the sum over each row's tokens, float64 `[B]`."""
        zeros = torch.zeros(len(self.lengths), dtype=torch.float64, device=flat.device)
        return zeros.index_add(0, self.row_of_token, flat.double())


@dataclass(frozen=True, slots=True)
class ScoredRows(Stage):
    """Rows with the scores of their tokens; None for a score that was not computed."""

    rows: Rows
    old_logprobs: Tensor
    """float32, under the proximal policy (old); with `proximal=rollout` the rollout's own."""
    reference_logprobs: Tensor | None = None
    """float32, under the policy that the run started from."""
    values: Tensor | None = None
    """float32: the critic's, of the state before each token."""
    sum_pi_squared: Tensor | None = None
    """float32: the sum of the squared probabilities that old gave at each token's position."""
    old_experts: Tensor | None = None
    """Like `routed_experts`: where old's own router sends each input position."""
    measured_agreement: RouteAgreement | None = None
    """How far both agree, where their routes themselves are elsewhere: on verl, with its workers."""

    @property
    def agreement(self) -> RouteAgreement | None:
        """How far the routes of rollout and old agree; None if either's are not known."""
        rows, old = self.rows, self.old_experts
        if rows.routed_experts is None or old is None:
            return self.measured_agreement
        tokens, shared, known = torch.full(rows.loss_mask.shape, torch.nan), list[Tensor](), list[Tensor]()
        parts = cut_lengths(rows.lengths, LINES)
        for part in parts:
            grid = rows.grid(torch.tensor(part))
            routes = grid.lay(rows.routed_experts, -1), grid.lay(old, -1)
            found = RouteAgreement.of(*routes, grid.lay(rows.loss_mask))
            grid.put(found.tokens, tokens)
            shared.append(found.shared)
            known.append(found.known)
        order = torch.tensor([row for part in parts for row in part]).argsort()
        return RouteAgreement(tokens, torch.cat(shared)[order], torch.cat(known)[order])


@dataclass(frozen=True, slots=True)
class CriticTargets:
    """What the value loss reads, of tokens."""

    values: Tensor
    """float32: the critic's, when the advantages were computed."""
    returns: Tensor
    """float32: what the critic is trained towards; 0 where it is not."""
    valued: Tensor
    """bool: where the critic is trained."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of the policy's loss on a micro-batch, as sent to verl's workers; `[B, T]` but for those of rows."""

    loss_mask: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    counted: Tensor
    prompt_shares: Tensor | None
    """float32 `[B]`."""
    sequence_tokens: Tensor | None = None
    """float32 `[B]`."""
    sequences: Tensor | None = None
    """float32 `[B, 5]`: `Sequences`; None where each row is a whole episode."""


@dataclass(frozen=True, slots=True)
class WeightedRows(Stage):
    """Scored rows with their advantages, weights and denominators: ready for their loss."""

    scored: ScoredRows
    advantages: Tensor
    """float32; 0 outside the mask."""
    weights: Tensor
    """float32: what a token's loss is multiplied with; 0 for what is not trained on."""
    counted: Tensor
    """bool: the tokens that the denominators count."""
    group: Tensor
    """int64 `[B]`: the group of the row's episode, numbered as in the `Experience`."""
    prompt_shares: Tensor | None = None
    """float32 `[B]`: what each counted token of a row counts in a mean over prompts; None unless it is read."""
    sequence_tokens: Tensor | None = None
    """float32 `[B]`: the counted tokens of a row's episode, in all its rows; None unless it is read."""
    sequences: Tensor | None = None
    """float32 `[B, 5]`: the `Sequences` of an update; None where they are not read, or each row is a whole episode."""
    critic: CriticTargets | None = None
    """None without a critic."""

    @property
    def denominators(self) -> Denominators:
        """The counts of these rows, as if they were all; an episode is one sequence, however many rows it has."""
        valued = 1 if self.critic is None else max(1, int(self.critic.valued.sum()))
        episodes = torch.unique(self.rows.episode_of_token[self.counted])
        return Denominators(max(1, int(self.counted.sum())), max(1, len(episodes)), valued)

    @property
    def rows(self) -> Rows:
        """What was sampled."""
        return self.scored.rows

    @property
    def inputs(self) -> LossInputs:
        """What `Algorithm.loss` reads of a micro-batch."""
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
            sequence_tokens=self.sequence_tokens,
            sequences=self.sequences,
        )


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the *whole* batch, so that the losses of its micro-batches add up to the loss of the batch."""

    tokens: int
    """Counted tokens."""
    sequences: int
    """Episodes with at least one counted token."""
    valued: int = 1
    """Tokens at which the critic is trained."""

    @classmethod
    def of(cls, counted: Tensor) -> Denominators:
        """Count a mask `[B, T]` of whole episodes; at least 1 each, so that an empty batch has loss 0."""
        return cls(max(1, int(counted.sum())), max(1, int(counted.any(-1).sum())))
