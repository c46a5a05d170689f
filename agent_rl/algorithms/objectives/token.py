"""Objectives per token that keep the policy near a proximal one: PPO and its relatives.

`base` explains the arguments that all share. A ratio is clipped below at `1 - clip_low_eps` and above at
`1 + clip_high_eps`. Losses weighted with theta / mu correct for stale or mismatched rollouts by themselves: a weight
old / mu on top would count that gap twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from agent_rl.algorithms.components import AboveOne, AtLeastOne, Fraction, NotNegative, Positive, objective
from agent_rl.algorithms.objectives.base import MAX_LOG_RATIO, Prepared, TokenLoss, log_ratio
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_PROBABILITY = 1e-8  # of "any other token" in a binary KL; verl's, which keeps a certain token's KL finite


@objective("reinforce", formula="L = -A log theta", source="Williams 1992")
def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """The policy gradient, `-A log theta` (Williams 1992), without any ratio; theta / old is only reported."""
    return _unclipped(_policy_gradient(logprobs, advantages, 1.0), _ratio(logprobs, old_logprobs))


@objective("likelihood", formula="L = -A log theta, of any policy's tokens", source="maximum likelihood; RFT, STaR")
def likelihood(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The negative log-likelihood of tokens, weighed by their advantages: with A = 1 that of fine-tuning.

    The gradient is that of `reinforce`. As it asks nothing about who sampled the tokens, stored episodes will do.
    """
    return _policy_gradient(logprobs, advantages, 1.0)


@objective(
    "ppo-clip",
    formula="L = max(-A r, -A clip(r, 1 - clip_low_eps, 1 + clip_high_eps)), r = theta/old",
    source="PPO, Schulman et al. 2017, eq. 7; clip-higher: DAPO, Yu et al. 2025",
)
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_eps: NotNegative = 0.2,
    clip_high_eps: NotNegative = 0.2,
    dual_clip: AboveOne | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate, `max(-A r, -A clip(r, 1 - low, 1 + high))`, r = theta / old.

    Schulman et al. 2017, eq. 7. With `clip_high_eps > clip_low_eps` it is DAPO's clip-higher (Yu et al. 2025, eq. 8).
    `dual_clip` bounds the loss of negative advantages by `-A dual_clip` (Ye et al. 2020, eq. 5); None for no such
    bound, as slime and AReaL; verl always has one, 3.
    """
    advantages, ratio = advantages.to(logprobs.dtype), _ratio(logprobs, old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low_eps, 1 + clip_high_eps)
    loss, cut = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        over = (advantages < 0) & (bound < loss)
        loss, cut = torch.where(over, bound, loss), cut | over
    return TokenLoss(loss, ratio.detach(), cut)


@objective("cispo", formula="L = -sg(clip(r)) A log theta, r = theta/old", source="CISPO, MiniMax-M1 2025, eq. 4")
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_eps: NotNegative | None = None,
    clip_high_eps: NotNegative | None = None,
    clip_high_cap: AtLeastOne | None = None,
) -> TokenLoss:
    """CISPO, `-sg[clip(r)] A log theta`, r = theta / old: a clipped token keeps its gradient, with a bounded weight.

    MiniMax-M1 2025, eq. 4-5. The upper bound has two spellings, and one number means two algorithms under them.

    Knobs:
        clip_low_eps: the weight is at least `1 - clip_low_eps`; None for no lower bound, as MiniMax.
        clip_high_eps: the weight is at most `1 + clip_high_eps` (the paper, verl, slime).
        clip_high_cap: the weight is at most this (TRL's `epsilon_high`; ScaleRL, Khatri et al. 2025, has 4 to 8).

    Raises:
        ConfigError: unless exactly one of `clip_high_eps` and `clip_high_cap` is given.
    """
    if clip_high_eps is not None and clip_high_cap is None:
        high = 1 + clip_high_eps
    elif clip_high_cap is not None and clip_high_eps is None:
        high = clip_high_cap
    else:
        raise ConfigError(
            f"CISPO needs one upper bound, got clip_high_eps={clip_high_eps} and clip_high_cap={clip_high_cap}: set "
            "clip_high_eps for a bound at 1 + eps (verl, slime) or clip_high_cap for the bound itself (TRL)"
        )
    low = 0.0 if clip_low_eps is None else 1 - clip_low_eps
    ratio = _ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(low, high)
    return TokenLoss(_policy_gradient(logprobs, advantages, weight), ratio, weight != ratio)


@objective("sapo", formula="L = -(4/tau) sigmoid(tau (r - 1)) A, r = theta/old", source="SAPO, Gao et al. 2025")
def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: Positive = 1.0,
    tau_negative: Positive = 1.05,
) -> TokenLoss:
    """SAPO, `-A 4 / tau sigmoid(tau (r - 1))`, r = theta / old: a gate that closes softly instead of a clip.

    Gao et al. 2025 (arXiv 2511.20347). At r = 1 the loss is -2 A / tau and its gradient -A. Nothing counts as clipped.
    tau is how fast the gate closes; the paper has it larger for negative advantages, as their gradients are less
    stable.
    """
    advantages, ratio = advantages.to(logprobs.dtype), _ratio(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, logprobs.new_tensor(tau_positive), logprobs.new_tensor(tau_negative))
    return _unclipped(-advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)), ratio)


@objective(
    "dppo-tv", formula="L = -sg(r) A log theta where |theta - mu| stays in bounds, r = theta/mu", source="DPPO, 2026"
)
def dppo_tv(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    delta_low: Fraction = 0.2,
    delta_high: Fraction = 0.2,
    ratio_cap: AtLeastOne = 20.0,
) -> TokenLoss:
    """DPPO-Binary-TV, `-M A sg[min(r, cap)] log theta`, r = theta / mu: a trust region in probability, not in ratio.

    M = 0 where the token's probability has moved in the advantage's direction by more than delta (arXiv 2602.04879):
    for A < 0 where theta - mu < -delta_low (verl's `clip_ratio_low`), for A > 0 where theta - mu > delta_high. verl's
    cap is 20, which its actor's `clip_ratio_c` of 3 overrules.
    """
    moved = logprobs.detach().exp() - rollout_logprobs.exp()
    beyond = _beyond(moved, advantages, delta_low, delta_high)
    return _truncated(logprobs, rollout_logprobs, advantages, beyond, ratio_cap)


@objective(
    "dppo-kl", formula="L = -sg(r) A log theta where KL(mu, theta) of the token stays in bounds", source="DPPO, 2026"
)
def dppo_kl(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    delta_low: NotNegative = 0.05,
    delta_high: NotNegative = 0.05,
    ratio_cap: AtLeastOne = 20.0,
) -> TokenLoss:
    """DPPO-Binary-KL: `dppo_tv` by KL(mu || theta) of "this token or any other", in nats, as in verl."""
    theta, mu = logprobs.detach(), rollout_logprobs
    # expm1 keeps the digits of 1 - p that exp loses where p is close to 1, as most tokens' are
    other_theta, other_mu = ((-torch.expm1(x)).clamp(min=_SMALLEST_PROBABILITY) for x in (theta, mu))
    kl = mu.exp() * (mu - theta) + other_mu * (other_mu.log() - other_theta.log())
    beyond = _beyond(torch.where(theta > mu, kl, -kl), advantages, delta_low, delta_high)
    return _truncated(logprobs, rollout_logprobs, advantages, beyond, ratio_cap)


@objective(
    "minirl", formula="L = -M sg(min(theta/mu, cap)) A log theta, M by r = theta/old", source="MiniRL, 2512.01374"
)
def minirl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_eps: NotNegative = 0.2,
    clip_high_eps: NotNegative = 0.27,
    ratio_cap: AtLeastOne = 5.0,
) -> TokenLoss:
    """MiniRL, `-M A sg[min(theta / mu, cap)] log theta`; M = 0 where PPO would clip r = theta / old.

    That is where A < 0 and r is below its lower bound, or A > 0 and r above its upper. Zheng et al. 2025 (arXiv
    2512.01374), who sum over tokens: dividing by length breaks their first-order argument.
    """
    ratio = _ratio(logprobs, old_logprobs).detach()
    beyond = _beyond(ratio - 1, advantages, clip_low_eps, clip_high_eps)
    token = _truncated(logprobs, rollout_logprobs, advantages, beyond, ratio_cap)
    return TokenLoss(token.loss, ratio, token.clipped)


Beyond = Literal["dropped", "capped"]


def m2po_keep(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    second_moment: float = 0.04,
    beyond: Beyond = "dropped",
) -> Tensor:
    """Return which tokens of a whole batch M2PO learns from, bool `[B, T]`, False outside `mask`.

    Only tokens that a clip could concern may go: those whose probability moved in the advantage's direction. Of these,
    the largest squared log(theta / mu) go first, until the mean is at most `second_moment`, in squared nats: with
    `beyond="dropped"` the mean of the rest (Algorithm 1), with "capped" that of all, in which those that went count as
    much as the largest that stays, as if ratios were clipped at its own (the authors' `kpo_clip_harmful_tokens`, which
    finds their bound in each micro-batch). Equal ones go together, so that the order of rows doesn't matter. AReaL
    considers all tokens, compares with `<`, and always leaves one; it has one mask per batch, with old in the place of
    theta.
    """
    gap = log_ratio(logprobs.detach(), rollout_logprobs).double()
    squares = gap.square()
    concerned = mask & _beyond(gap, advantages, 0.0, 0.0)
    ascending = squares[concerned].sort().values
    number = torch.arange(1, len(ascending) + 1, device=gap.device)
    sums = ascending.cumsum(0)
    means = sums / number if beyond == "dropped" else (sums + (len(ascending) - number) * ascending) / len(ascending)
    kept = int((means <= second_moment).sum())  # a prefix: means of ascending numbers ascend
    limit = float(ascending[kept]) if kept < len(ascending) else math.inf
    return mask & ~(concerned & (squares >= limit))


def m2po_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    second_moment: Positive = 0.04,
    beyond: Beyond = "dropped",
) -> Prepared:
    """Set the weights of the tokens to 0 that `m2po_keep` leaves out of a whole batch."""
    keep = m2po_keep(logprobs, rollout_logprobs, advantages, mask, second_moment=second_moment, beyond=beyond)
    masked = float((mask & ~keep).sum()) / max(1, int(mask.sum()))
    return Prepared({"train/clip_fraction": masked}, weights=torch.where(keep, weights, weights.new_zeros(())))


@objective(
    "m2po",
    formula="L = -M A r, r = theta/mu, M keeps mean log(r)^2 <= second_moment",
    source="M2PO, 2510.01161",
    prepare=m2po_mask,
)
def m2po(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """M2PO without its mask, `-A r`, r = theta / mu, unclipped (Zheng et al. 2025, arXiv 2510.01161).

    The mask M multiplies it from outside: `m2po_keep` needs the whole batch, or the loss would depend on its cut.
    """
    ratio = _ratio(logprobs, rollout_logprobs)
    return _unclipped(-advantages.to(logprobs.dtype) * ratio, ratio)


def _ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    return (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(logprobs.dtype)


def _unclipped(loss: Tensor, ratio: Tensor) -> TokenLoss:
    return TokenLoss(loss, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def _policy_gradient(logprobs: Tensor, advantages: Tensor, weight: Tensor | float) -> Tensor:
    return -advantages.to(logprobs.dtype) * weight * logprobs


def _beyond(moved: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """True where a token has moved too far in its advantage's direction."""
    return ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))


def _truncated(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, beyond: Tensor, cap: float) -> TokenLoss:
    """The policy gradient weighted with `min(theta / mu, cap)`, none where `beyond`."""
    ratio = _ratio(logprobs, rollout_logprobs).detach()
    loss = torch.where(beyond, 0.0, _policy_gradient(logprobs, advantages, ratio.clamp(max=cap)))
    return TokenLoss(loss, ratio, beyond | (ratio > cap))
