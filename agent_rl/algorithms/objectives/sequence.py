"""Objectives whose ratio is a whole sequence's: GSPO and its relatives, and DeepSeek's mask of sequences.

A sequence is an episode: one that was cut into several rows has one ratio, of all tokens sampled in it; `Sequences`
says what a row can't know of the others. `base` explains the arguments that all share. A sequence's ratio s is clipped
below at `1 - clip_low_eps` and above at `1 + clip_high_eps`; save in `gspo_token` it has one advantage, its tokens'
mean. Where a loss is a sequence's, each token carries it whole, and "seq-mean-token-mean" makes of it the papers' mean
over sequences; "token-mean" would weight it by length once more. What is clamped to ± `MAX_LOG_RATIO` is the mean that
is exponentiated, not the tokens' log-ratios that it is made of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agent_rl.algorithms.components import NotNegative, Positive, negative_mask, objective
from agent_rl.algorithms.objectives.base import MAX_LOG_RATIO, Sequences, TokenLoss
from agent_rl.algorithms.objectives.token import ppo_clip
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def plain_drift(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the log-ratio theta / old of each token."""
    return logprobs - old_logprobs


def clipped_drift(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_eps: NotNegative = 0.4,
    clip_high_eps: NotNegative = 0.4,
) -> Tensor:
    """Return the log-ratio of each token, clipped on the side of the sequence's advantage: GMPO's, see `gmpo`."""
    raw = logprobs - old_logprobs
    clipped = torch.where(advantages > 0, raw.clamp(max=clip_high_eps), raw)
    return torch.where(advantages < 0, clipped.clamp(min=-clip_low_eps), clipped)


@objective(
    "gspo",
    formula="L = PPO-clip of s = exp(mean_t log(theta/old))",
    source="GSPO, Zheng et al. 2025, eq. 5",
    drift=plain_drift,
)
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    clip_low_eps: NotNegative = 3e-4,
    clip_high_eps: NotNegative = 4e-4,
) -> TokenLoss:
    """GSPO, PPO's clipped surrogate of the sequence's ratio `s = exp(mean_t log(theta / old))`.

    Zheng et al. 2025 (arXiv 2507.18071), eq. 5-7.
    """
    log_ratio = _mean(logprobs - old_logprobs, mask, sequences.length, sequences.drift).to(logprobs.dtype)
    zero = torch.zeros_like(log_ratio)
    advantage = _mean(advantages, mask, sequences.length, sequences.advantage)
    row = ppo_clip(log_ratio, zero, advantage, clip_low_eps=clip_low_eps, clip_high_eps=clip_high_eps)
    return _whole(row, mask)


@objective(
    "gspo-token",
    formula="L = PPO-clip of sg(s) theta/sg(theta)",
    source="GSPO-token, Zheng et al. 2025, eq. 13",
    drift=plain_drift,
)
def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    clip_low_eps: NotNegative = 3e-4,
    clip_high_eps: NotNegative = 4e-4,
) -> TokenLoss:
    """GSPO-token: `s_t = sg[s] theta / sg[theta]`, so that each token may have its own advantage.

    Zheng et al. 2025, eq. 13-14; what verl calls "gspo". With equal advantages value and gradient are `gspo`'s. verl
    clamps the log-ratio above only, at 10: at that bound a negative advantage's gradient ends there, at 20 here.
    """
    inside = torch.where(mask, logprobs, 0.0)
    log_ratio = _mean(logprobs - old_logprobs, mask, sequences.length, sequences.drift).to(logprobs.dtype).detach()
    return ppo_clip(
        log_ratio + (inside - inside.detach()),  # the difference first: it is 0 exactly, whatever the magnitudes
        torch.zeros_like(inside),
        torch.where(mask, advantages, 0.0),
        clip_low_eps=clip_low_eps,
        clip_high_eps=clip_high_eps,
    )


@objective("luspo", formula="L = |y| times GSPO's", source="LUSPO, as in TRL", drift=plain_drift)
def luspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    clip_low_eps: NotNegative = 2e-3,
    clip_high_eps: NotNegative = 2.5e-3,
) -> TokenLoss:
    """LUSPO, GSPO's loss of a sequence times its number of sampled tokens, so that long ones aren't held back.

    Liu et al. 2026 (arXiv 2602.05261), with the bounds of its section 5.1; TRL's `loss_type="luspo"` under
    "seq-mean-token-mean". The same as `gspo` under "seq-mean-token-sum".
    """
    bounds = {"clip_low_eps": clip_low_eps, "clip_high_eps": clip_high_eps}
    token = gspo(logprobs, old_logprobs, advantages, mask, sequences, **bounds)
    return replace(token, loss=token.loss * sequences.length)


@objective(
    "gmpo",
    formula="L = -A exp(mean_t clipped log(theta/old))",
    source="GMPO, Zhao et al. 2025, 2507.20673",
    drift=clipped_drift,
)
def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    clip_low_eps: NotNegative = 0.4,
    clip_high_eps: NotNegative = 0.4,
) -> TokenLoss:
    """GMPO, `-A g`: g is the geometric mean of the tokens' ratios theta / old, each clipped as PPO would.

    Zhao et al. 2025 (arXiv 2507.20673); verl's "geo_mean". For A > 0 log-ratios are clipped above only, at
    `clip_high_eps`, for A < 0 below only, at `-clip_low_eps`: ratios at `exp(-0.4)`, not at 0.6. A clipped token has no
    gradient, the others of its row keep theirs. `ratio` is g.
    """
    advantage = _mean(advantages, mask, sequences.length, sequences.advantage).to(logprobs.dtype)
    bounds = {"clip_low_eps": clip_low_eps, "clip_high_eps": clip_high_eps}
    clipped = clipped_drift(logprobs, old_logprobs, advantage, **bounds)
    mean = _mean(clipped, mask, sequences.length, sequences.drift).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = mean.exp().to(logprobs.dtype)
    row = TokenLoss(-advantage * ratio, ratio.detach(), clipped != logprobs - old_logprobs)
    return _whole(row, mask)


@negative_mask(
    "opsm",
    formula="L = 0 for episodes with A < 0 and mean_t log(mu/theta) > delta",
    source="off-policy sequence masking, DeepSeek-V3.2 2025",
)
def off_policy_sequences(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, delta: Positive
) -> Tensor:
    """Return the sequences to drop, bool `[B]`: bad ones that the policy has already moved away from.

    A sequence goes if its advantage is negative and the mean of log(mu / theta) over its sampled tokens exceeds delta,
    in nats (DeepSeek-V3.2 2025, off-policy sequence masking; slime has 1e-4). Its loss is to be 0; in denominators it
    still counts. A row given here is an episode, however many rows it is trained in. TRL has theta here as well, slime
    old; slime has old for mu by default.
    """
    drift = _row_mean((rollout_logprobs - logprobs.detach()).double(), mask)
    return ((_row_mean(advantages.double(), mask) < 0) & (drift > delta)).squeeze(-1)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over a row's sampled tokens, `[B, 1]`; 0 where there are none."""
    return _mean(values, mask, mask.sum(-1, keepdim=True), 0.0)


def _mean(values: Tensor, mask: Tensor, length: Tensor, elsewhere: Tensor | float) -> Tensor:
    """The mean over a sequence's sampled tokens, `[B, 1]`, of which other rows have a sum; 0 where there are none."""
    return (torch.where(mask, values, 0.0).sum(-1, keepdim=True) + elsewhere) / length.clamp(min=1)


def _whole(row: TokenLoss, mask: Tensor) -> TokenLoss:
    """Give every token of a row what holds for its sequence."""
    shape = mask.shape
    return TokenLoss(row.loss.expand(shape), row.ratio.expand(shape), row.clipped.expand(shape) & mask, is_whole=True)
