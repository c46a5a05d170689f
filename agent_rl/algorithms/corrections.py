"""Corrections for the gap between the policy that sampled (mu) and the one the trainer starts from (old).

Every function takes `(old_logprobs, rollout_logprobs, mask)`, all `[B, T]`: under old, under mu, and True at sampled
tokens. A weight function returns what each token's loss is multiplied with, `[B, T]` in the dtype of `old_logprobs`, 0
outside the mask; a rejection function returns which tokens stay, bool `[B, T]`, a subset of the mask. Neither has a
gradient. They are for the whole batch, after the advantages and before it is cut into micro-batches: no reward is lost
with a rejected token, and nothing depends on the cut. As a component's, a row is an episode, however many rows it is
trained in. Weights are capped at `cap` and, with `normalise`, divided by their mean over the batch afterwards; bounds
`low` and `high` include both ends, and 1 is between them.

The ratio is w = old / mu, everywhere. verl's `*_k1` bounds are on mu / old: its `token_k1` with "0.5_5.0" keeps w in
[0.2, 2], which is `token_rejection(low=0.2, high=2.0)` here. Log-ratios are clamped to ± 20 before exponentiation (a
row's after they are summed), so that bounds beyond e^± 20 never reject. All arithmetic is in float64. A NaN inside the
mask gives a NaN weight and is rejected. A row with nothing sampled has weights 0 and takes no part in any mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from agent_rl.algorithms.components import AtLeastOne, Fraction, Positive, rejection, weight
from agent_rl.algorithms.objectives.base import MAX_LOG_RATIO
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Over = Literal["token", "sequence", "geometric"]
"""Whose ratio: each token's, or the product or the geometric mean of a row's."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a correction decided about every token; both `[B, T]`."""

    weight: Tensor
    """What the token's loss is multiplied with; 0 outside the mask."""
    keep: Tensor
    """bool: False where the token is rejected; a subset of the mask."""


def batch_normalised(weight: Tensor, mask: Tensor) -> Tensor:
    """Divide weights by their mean over the batch's sampled tokens, so that the correction leaves the step size alone.

    verl's `rollout_is_batch_normalize`: after truncation, before rejection. Weights that are all 0 stay 0.
    """
    inside = torch.where(mask, weight.double(), 0.0)
    mean = inside.sum() / mask.sum().clamp(min=1)
    return (inside / torch.where(mean == 0, 1.0, mean)).to(weight.dtype)


def sequence_normalised(weight: Tensor, mask: Tensor, episode: Tensor) -> Tensor:
    """Divide weights by the mean over sequences of each one's mean: long ones would count more in that over tokens.

    Rows with the same number in `episode`, int64 `[B]`, are one sequence.
    """
    inside = torch.where(mask, weight.double(), 0.0)
    _, index = torch.unique(episode, return_inverse=True)
    nothing = inside.new_zeros(len(index))
    sums, counts = (nothing.index_add(0, index, x.sum(-1).double()) for x in (inside, mask))
    mean = (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
    return (inside / torch.where(mean == 0, 1.0, mean)).to(weight.dtype)


def _token_normalised(found: Tensor, mask: Tensor, *, normalise: bool = False) -> Tensor:
    return batch_normalised(found, mask) if normalise else found


def _sequence_normalised(found: Tensor, mask: Tensor, episode: Tensor, *, normalise: bool = False) -> Tensor:
    return sequence_normalised(found, mask, episode) if normalise else found


@weight(
    "token-tis",
    formula="min(w, cap), w = old/mu",
    source="Truncated IS, Yao et al. 2025",
    layout="lines",
    finish=_token_normalised,
)
def token_tis(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: AtLeastOne = 2.0) -> Tensor:
    """Truncated importance sampling by token (Yao et al. 2025, "Off-Policy RL").

    The cap is 2 in verl, slime, SkyRL and open-instruct.
    """
    return _truncated(old_logprobs, rollout_logprobs, mask, "token", cap)


@weight("icepop", formula="w if low <= w <= high else 0", source="IcePop, Ring-1T, Ling team 2025", layout="lines")
def token_icepop(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.5, high: AtLeastOne = 5.0
) -> Tensor:
    """IcePop: `w` if it is in `[low, high]`, else 0, with the denominators as they were (Ring-1T, Ling team 2025).

    Both ends included, as in slime. A masked token still counts in the mean, unlike one of `token_rejection`.
    """
    ratio = _ratio(old_logprobs, rollout_logprobs, mask)
    # what is not inside is not all outside: a NaN stays, to be seen
    outside = ~_inside(ratio, low, high) & ~ratio.isnan()
    return torch.where(mask & ~outside, ratio, 0.0).to(old_logprobs.dtype)


@weight(
    "sequence-tis",
    formula="min(prod_t w, cap)",
    source="Truncated IS, Liu et al. 2025",
    layout="lines",
    finish=_sequence_normalised,
)
def sequence_tis(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: AtLeastOne = 2.0) -> Tensor:
    """Truncated importance sampling by sequence, on every token of the row (Liu et al. 2025).

    verl's `rollout_is=sequence`, cap 2; SkyRL has 5. TRL's default, "sequence_mask", gives rows beyond 3 the weight 0:
    that is `cap=3` with `sequence_rejection(low=0, high=3)`, rejected tokens counted in the denominators.
    """
    return _truncated(old_logprobs, rollout_logprobs, mask, "sequence", cap)


@weight(
    "geometric-tis",
    formula="min((prod_t w)^(1/|y|), cap)",
    source="slime, mis_level=geometric",
    layout="lines",
    finish=_sequence_normalised,
)
def geometric_tis(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: AtLeastOne = 2.0) -> Tensor:
    """Truncated geometric mean ratio, on every token of the row: biased, but it does not shrink with length.

    slime's `mis_level: geometric` with `mis_mode: truncate`.
    """
    return _truncated(old_logprobs, rollout_logprobs, mask, "geometric", cap)


@rejection("token", formula="keep tokens: low <= w <= high", source="verl token_k1, bounds inverted", layout="lines")
def token_rejection(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.5, high: AtLeastOne = 2.0
) -> Tensor:
    """Masked importance sampling by token; unlike IcePop the caller may count only kept tokens."""
    return mask & _inside(_ratio(old_logprobs, rollout_logprobs, mask), low, high)


@rejection(
    "sequence", formula="keep rows: low <= prod_t w <= high", source="Masked IS, Liu et al. 2025", layout="lines"
)
def sequence_rejection(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.5, high: AtLeastOne = 2.0
) -> Tensor:
    """Masked importance sampling by sequence (Liu et al. 2025).

    SkyRL's "product" mask; verl's `seq_sum_k1`, with the bounds inverted and each token clamped to ± 20 before the sum.
    """
    return mask & _inside(_ratio(old_logprobs, rollout_logprobs, mask, "sequence"), low, high)


@rejection(
    "geometric",
    formula="keep rows: low <= (prod_t w)^(1/|y|) <= high",
    source="Geometric RS, Liu et al. 2025",
    layout="lines",
)
def geometric_rejection(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: Fraction = 0.999, high: AtLeastOne = 1.001
) -> Tensor:
    """Keep rows by their geometric mean ratio (Liu et al. 2025).

    verl's `seq_mean_k1`, with the bounds inverted; NeMo has [0.999, 1.002], SkyRL [0.99, 1.01]. verl clamps each
    token's log-ratio to ± 20 before the mean, where here only the mean is clamped: a single token that mu gave but old
    all but excludes moves a long row's mean further here.
    """
    return mask & _inside(_ratio(old_logprobs, rollout_logprobs, mask, "geometric"), low, high)


@rejection(
    "k3", formula="keep rows: {over}_t (w - 1 - log w) <= max_k3", source="verl seq_mean_k3, seq_max_k3", layout="lines"
)
def k3_rejection(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    max_k3: Positive = 0.01,
    over: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Keep rows whose k3 estimate of KL(mu || old) is at most `max_k3`, in nats per token (Schulman 2020).

    Either the mean over the row's tokens or its worst one counts. Deviations in both directions add up, where they
    cancel in a product.
    """
    per_token = k3(rollout_gap(old_logprobs, rollout_logprobs, mask))
    row = _row_mean(per_token, mask) if over == "mean" else per_token.amax(-1, keepdim=True)
    return mask & (row <= max_k3)


@rejection(
    "worst-token", formula="keep rows: low <= every w <= high", source="the veto of slime, SkyRL", layout="lines"
)
def worst_token_rejection(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    low: Fraction = 1e-4,
    high: AtLeastOne | None = None,
) -> Tensor:
    """Keep rows without a single token beyond the bounds; `high=None` for no upper one.

    The veto of slime and of verl until late 2025, lower bound only; SkyRL suggests 1e-4 and 100.
    """
    inside = _inside(_ratio(old_logprobs, rollout_logprobs, mask), low, float("inf") if high is None else high)
    return mask & inside.all(-1, keepdim=True)  # outside the mask the ratio is 1


def rollout_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
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


def _ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, over: Over = "token") -> Tensor:
    """The ratio w, `[B, T]` by token, `[B, 1]` by row; 1 outside the mask."""
    gaps = rollout_gap(old_logprobs, rollout_logprobs, mask)
    if over == "sequence":
        gaps = gaps.sum(-1, keepdim=True)
    elif over == "geometric":
        gaps = _row_mean(gaps, mask)
    return clamped_exp(gaps)


def _truncated(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, over: Over, cap: float) -> Tensor:
    weight = torch.where(mask, _ratio(old_logprobs, rollout_logprobs, mask, over).clamp(max=cap), 0.0)
    return weight.to(old_logprobs.dtype)


def _row_mean(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over a row's sampled tokens, `[B, 1]`, of numbers that are 0 outside the mask."""
    return per_token.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    if not 0 <= low <= 1 <= high:
        raise ConfigError(f"bounds [{low}, {high}] on old / mu must have 1 between them, the ratio of equal policies")
    return (ratio >= low) & (ratio <= high)
