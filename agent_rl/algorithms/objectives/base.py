"""The result of every objective, and the clamp of ratios.

Three policies may be involved: `mu` sampled the tokens, `old` is the proximal policy that clipping is relative to, and
`theta` is being trained. An objective reads some of these, all `[B, T]`: `logprobs`, `old_logprobs`, `rollout_logprobs`
and `reference_logprobs`, under theta, old, mu and the reference, `advantages` and `mask`; one of sequences also reads
`sequences`. Only `logprobs` has a gradient. Where `mask` is False the caller has put zeros, and what is returned there
is never read. An objective that reads `rollout_logprobs` weighs tokens by theta / mu itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exponentiation, so that one absurd token can't make the loss infinite."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token and what it says about the update; all `[B, T]`, not yet masked."""

    loss: Tensor
    ratio: Tensor
    """The ratio that the objective is about, without gradient."""
    clipped: Tensor
    """bool: where the token's gradient was cut off or its weight capped."""
    is_whole: bool = False
    """Whether each token's loss is its sequence's, so that it has a gradient by what other rows of that weigh, too."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """What objectives of sequences know of each row's episode, whose other rows may be elsewhere; all `[B, 1]`."""

    length: Tensor
    """The tokens that were sampled in the episode."""
    drift: Tensor
    """The sum over the tokens of its other rows of what the objective takes the mean of, under theta as it is."""
    advantage: Tensor
    """The sum of their advantages."""
    others: Tensor
    """What the counted tokens of its other rows weigh, by the tokens that were sampled in this one."""
    left_out: Tensor
    """1 where the negative mask leaves the episode out, as theta is; else 0."""

    @classmethod
    def of(cls, mask: Tensor) -> Sequences:
        """Return what is known where each row is a whole episode."""
        length = mask.sum(-1, keepdim=True)
        nothing = torch.zeros_like(length, dtype=torch.float32)
        return cls(length, nothing, nothing, nothing, nothing)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an objective decided about the whole batch before an update."""

    metrics: dict[str, float]
    advantages: Tensor | None = None
    """Replaces the batch's, `[B, T]`; None keeps them."""
    weights: Tensor | None = None
    """Replaces the batch's, `[B, T]`; None keeps them."""


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return `log(theta / other)`, clamped to ± `MAX_LOG_RATIO`."""
    return (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
