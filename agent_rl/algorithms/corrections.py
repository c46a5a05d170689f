"""Corrections for the gap between the policy that sampled (mu) and the one the trainer starts from (old).

Every function takes `(old_logprobs, rollout_logprobs, mask)`, all `[B, T]`, and its knobs by name. A weight function
returns what each token's loss is multiplied with, `[B, T]` in the dtype of `old_logprobs`, 0 outside the mask; a
rejection function returns which tokens stay, bool `[B, T]`, a subset of the mask. Neither has a gradient. They are for
the whole batch, after the advantages and before it is cut into micro-batches: no reward is lost with a rejected token,
and nothing depends on the cut.

The ratio is w = old / mu, everywhere. verl's `*_k1` bounds are on mu / old: its `token_k1` with "0.5_5.0" keeps w in
[0.2, 2], which is `token_rejection(low=0.2, high=2.0)` here. Log-ratios are clamped to ± 20 before exponentiation (a
row's after they are summed), so that bounds beyond e^± 20 never reject. All arithmetic is in float64. A NaN inside the
mask gives a NaN weight and is rejected. A row with nothing sampled has weights 0 and takes no part in any mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.algorithms.components import Fraction, Positive, rejection, weight
from agent_rl.algorithms.objectives.base import MAX_LOG_RATIO
from agent_rl.errors import ConfigError

AtLeastOne = Annotated[float, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Weights:
    """What a correction decided about every token; both `[B, T]`."""

    weight: Tensor
    """What the token's loss is multiplied with; 0 outside the mask."""
    keep: Tensor
    """bool: False where the token is rejected; a subset of the mask."""


@weight("token-tis", formula="min(w, cap), w = old/mu", source="Truncated IS, Yao et al. 2025")
def token_tis(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: Positive = 2.0, normalise: bool = False
) -> Tensor:
    """Truncated importance sampling by token: `min(w, cap)` (Yao et al. 2025, "Off-Policy RL").

    Args:
        old_logprobs: under old.
        rollout_logprobs: under mu.
        mask: the sampled tokens.
        cap: 2 in verl, slime, SkyRL and open-instruct.
        normalise: divide by the mean over sampled tokens, see `batch_normalised`.
    """
    weight = clamped_exp(log_ratio(old_logprobs, rollout_logprobs, mask)).clamp(max=cap)
    return _weight(weight, old_logprobs, mask, "token" if normalise else None)


@weight("icepop", formula="w if low <= w <= high else 0", source="IcePop, Ring-1T, Ling team 2025")
def token_icepop(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.5, high: AtLeastOne = 5.0
) -> Tensor:
    """IcePop: `w` if it is in `[low, high]`, else 0, with the denominators as they were (Ring-1T, Ling team 2025).

    Both ends included, as in slime. A masked token still counts in the mean, unlike one of `token_rejection`.
    """
    ratio = clamped_exp(log_ratio(old_logprobs, rollout_logprobs, mask))
    # what is not inside is not all outside: a NaN stays, to be seen
    outside = ~_inside(ratio, low, high) & ~ratio.isnan()
    return _weight(torch.where(outside, 0.0, ratio), old_logprobs, mask)


@weight("sequence-tis", formula="min(prod_t w, cap)", source="Truncated IS, Liu et al. 2025")
def sequence_tis(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: Positive = 2.0, normalise: bool = False
) -> Tensor:
    """Truncated importance sampling by sequence: `min(prod w, cap)` on every token of the row (Liu et al. 2025).

    verl's `rollout_is=sequence`, cap 2; SkyRL has 5. TRL's default, "sequence_mask", gives rows beyond 3 the weight 0:
    that is `cap=3` with `sequence_rejection(low=0, high=3)`, rejected tokens counted in the denominators.
    `normalise` divides by the mean over rows, see `batch_normalised`.
    """
    total = log_ratio(old_logprobs, rollout_logprobs, mask).sum(-1, keepdim=True)
    return _weight(clamped_exp(total).clamp(max=cap), old_logprobs, mask, "sequence" if normalise else None)


@weight("geometric-tis", formula="min((prod_t w)^(1/|y|), cap)", source="slime, mis_level=geometric")
def geometric_tis(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: Positive = 2.0, normalise: bool = False
) -> Tensor:
    """Truncated geometric mean ratio, `min((prod w)^(1/|y|), cap)`, on every token of the row.

    slime's `mis_level: geometric` with `mis_mode: truncate`. Biased, but it does not shrink with length. `normalise`
    divides by the mean over rows, see `batch_normalised`.
    """
    mean = _mean(log_ratio(old_logprobs, rollout_logprobs, mask), mask)
    return _weight(clamped_exp(mean).clamp(max=cap), old_logprobs, mask, "sequence" if normalise else None)


def batch_normalised(weight: Tensor, mask: Tensor, *, over: Literal["token", "sequence"] = "token") -> Tensor:
    """Divide weights by their mean over the batch, so that the correction leaves the step size alone.

    verl's `rollout_is_batch_normalize`: after truncation, before rejection. It takes the mean over sampled tokens for
    token weights, and over rows (of each row's mean) for sequence weights, whose long rows would count more otherwise.

    Args:
        weight: `[B, T]`.
        mask: the sampled tokens; a row without any takes no part.
        over: what counts once in the mean.

    Returns:
        Weights `[B, T]`, 0 outside the mask; as they were where all of them are 0.
    """
    inside = torch.where(mask, weight.double(), 0.0)
    counts = mask.sum(-1)
    if over == "token":
        mean = inside.sum() / counts.sum().clamp(min=1)
    else:
        mean = (inside.sum(-1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
    return (inside / torch.where(mean == 0, 1.0, mean)).to(weight.dtype)


def route_mask(weight: Tensor, agreement: Tensor, *, min_agreement: float) -> Tensor:
    """Set the weight to 0 where too few layers of a mixture of experts took the same experts in both engines.

    Args:
        weight: `[B, T]`.
        agreement: `[B, T]`, in [0, 1], see `moe.agreement.token_agreement`; NaN where it is not known keeps the weight.
        min_agreement: what is below loses its weight; it still counts in the denominators, as with IcePop.
    """
    return torch.where(agreement < min_agreement, 0.0, weight)


@rejection("token", formula="keep tokens: low <= w <= high", source="verl token_k1, bounds inverted")
def token_rejection(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.5, high: AtLeastOne = 2.0
) -> Tensor:
    """Masked importance sampling by token: keep tokens with `w` in `[low, high]`.

    Unlike IcePop the caller may count only kept tokens. verl's `token_k1`, with the bounds inverted.
    """
    return mask & _inside(clamped_exp(log_ratio(old_logprobs, rollout_logprobs, mask)), low, high)


@rejection("sequence", formula="keep rows: low <= prod_t w <= high", source="Masked IS, Liu et al. 2025")
def sequence_rejection(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.5, high: AtLeastOne = 2.0
) -> Tensor:
    """Masked importance sampling by sequence: keep rows with `prod w` in `[low, high]` (Liu et al. 2025).

    SkyRL's "product" mask; verl's `seq_sum_k1`, with the bounds inverted and each token clamped to ± 20 before the sum.
    """
    total = log_ratio(old_logprobs, rollout_logprobs, mask).sum(-1, keepdim=True)
    return mask & _inside(clamped_exp(total), low, high)


@rejection("geometric", formula="keep rows: low <= (prod_t w)^(1/|y|) <= high", source="Geometric RS, Liu et al. 2025")
def geometric_rejection(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.999, high: AtLeastOne = 1.001
) -> Tensor:
    """Keep rows whose geometric mean ratio, `(prod w)^(1/|y|)`, is in `[low, high]` (Liu et al. 2025).

    verl's `seq_mean_k1`, with the bounds inverted; NeMo has [0.999, 1.002], SkyRL [0.99, 1.01]. verl clamps each
    token's log-ratio to ± 20 before the mean, where here only the mean is clamped: a single token that mu gave but old
    all but excludes moves a long row's mean further here.
    """
    mean = _mean(log_ratio(old_logprobs, rollout_logprobs, mask), mask)
    return mask & _inside(clamped_exp(mean), low, high)


@rejection("k3", formula="keep rows: {over}_t (w - 1 - log w) <= max_k3", source="verl seq_mean_k3, seq_max_k3")
def k3_rejection(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    max_k3: Positive = 0.01,
    over: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Keep rows whose k3 estimate of KL(mu || old), `w - 1 - log w`, is at most `max_k3` (Schulman 2020).

    verl's `seq_mean_k3` and `seq_max_k3`. Deviations in both directions add up, where they cancel in a product.

    Args:
        old_logprobs: under old.
        rollout_logprobs: under mu.
        mask: the sampled tokens.
        max_k3: in nats per token.
        over: whether the mean over a row's tokens counts, or its worst one.
    """
    per_token = k3(log_ratio(old_logprobs, rollout_logprobs, mask))
    row = _mean(per_token, mask) if over == "mean" else per_token.amax(-1, keepdim=True)
    return mask & (row <= max_k3)


@rejection("worst-token", formula="keep rows: low <= every w <= high", source="the veto of slime, SkyRL")
def worst_token_rejection(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    low: Fraction = 1e-4,
    high: AtLeastOne | None = None,
) -> Tensor:
    """Keep rows without a single token whose `w` is below `low` or above `high`; None for no upper bound.

    The veto of slime and of verl until late 2025, lower bound only; SkyRL suggests 1e-4 and 100.
    """
    ratio = clamped_exp(log_ratio(old_logprobs, rollout_logprobs, mask))
    inside = _inside(ratio, low, float("inf") if high is None else high)
    return mask & inside.all(-1, keepdim=True)  # outside the mask the ratio is 1


def log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `log(old / mu)`, float64 `[B, T]`, without gradient, not clamped; 0 outside the mask."""
    gap = old_logprobs.detach().double() - rollout_logprobs.detach().double()
    return torch.where(mask, gap, 0.0)


def k3(log_ratios: Tensor) -> Tensor:
    """Return the k3 estimator `w - 1 - log w` of KL(mu || old), of clamped log-ratios; never negative."""
    clamped = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (clamped.expm1() - clamped).clamp(min=0)


def clamped_exp(log_ratios: Tensor) -> Tensor:
    """Return the ratios of log-ratios, clamped before."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _mean(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over a row's sampled tokens, `[B, 1]`; 0 outside the mask is taken for granted."""
    return per_token.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    if not 0 <= low <= 1 <= high:
        raise ConfigError(f"bounds [{low}, {high}] on old / mu must have 1 between them, the ratio of equal policies")
    return (ratio >= low) & (ratio <= high)


def _weight(
    weight: Tensor, old_logprobs: Tensor, mask: Tensor, normalise: Literal["token", "sequence"] | None = None
) -> Tensor:
    weight = torch.where(mask, weight, 0.0)
    weight = batch_normalised(weight, mask, over=normalise) if normalise else weight
    return weight.to(old_logprobs.dtype)
