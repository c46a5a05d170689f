"""Advantages of tokens: returns, GAE, whitening and a baseline for every step of a row.

All take and return `[B, T]` and know only the tokens that the policy sampled, those of `mask`, wherever they are in a
row: what the environment inserts between them changes nothing, and does not discount. As components a row is a whole
episode, so that nothing depends on how it was cut. Results are float64, 0 outside
the mask, and carry no gradient. A NaN reward means not scored: what follows from it is NaN, what does not is as if it
had not been in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_rl.algorithms.components import Fraction, advantage
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

WHITEN_EPS = 1e-8
"""Added to the variance under the root, as in verl."""


def settle(rewards: Tensor, mask: Tensor) -> Tensor:
    """Move each reward to the nearest sampled token at or before it, so that none is lost.

    A reward may be on a tool's result or on the template's closing tokens. verl's estimators multiply by the mask or
    skip such tokens, and the reward is gone without a word. Before the first sampled token, a reward goes to that one.
    Only a row without any sampled token is left with nothing.
    """
    rewards = rewards.detach().double()
    position = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    before = torch.where(mask, position, -1).cummax(-1).values
    first = mask.int().argmax(-1, keepdim=True)
    home = torch.where(before < 0, first, before)
    return torch.where(mask, torch.zeros_like(rewards).scatter_add(-1, home, rewards), 0.0)


@advantage(
    "returns",
    formula="A_t = sum_{s>=t} gamma^(s-t) r_s over sampled tokens",
    source="REINFORCE, Williams 1992",
    layout="lines",
)
def returns_to_go(rewards: Tensor, mask: Tensor, *, gamma: Fraction = 1.0) -> Tensor:
    """Monte-Carlo returns, `G_t = r_t + gamma G_{t+1}` over the sampled tokens of a row; see `settle`."""
    rewards = settle(rewards, mask)
    returns = _scan(rewards, torch.ones_like(rewards).masked_fill(mask, gamma))
    return torch.where(mask, returns, 0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the sampled tokens of a row (Schulman et al. 2016, eq. 16).

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}`, where `t + 1` is the next sampled
    token: across a gap the value and the running advantage are carried unchanged. verl does the same, but drops rewards
    in gaps, leaves what it carried on the gap's tokens, and whitens the result; here that is up to the caller.

    Values are the critic's for the state before each token, not read outside the mask. `lam` is 1 for Monte-Carlo
    returns minus values, 0 for one-step differences. Returned are the advantages and the returns, advantages + values:
    what the critic should predict.
    """
    rewards = settle(rewards, mask)
    values = torch.where(mask, values.detach().double(), 0.0)
    width = mask.shape[-1]
    position = torch.arange(width, device=mask.device).expand_as(mask)
    here_or_later = torch.where(mask, position, width).flip(-1).cummin(-1).values.flip(-1)
    following = torch.nn.functional.pad(here_or_later[:, 1:], (0, 1), value=width)  # width: none, the row's end
    next_values = torch.nn.functional.pad(values, (0, 1)).gather(-1, following)
    delta = torch.where(mask, rewards + gamma * next_values - values, 0.0)
    advantages = torch.where(mask, _scan(delta, torch.ones_like(delta).masked_fill(mask, gamma * lam)), 0.0)
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Bring the sampled tokens of the whole batch to mean 0 and variance 1, `(x - mean) / sqrt(var + 1e-8)`.

    The variance has Bessel's correction, as in verl (masked_whiten) and TRL. Every token counts the same, so long rows
    dominate the statistics. A single token has no variance (verl raises): it is centred and not scaled. Equal values
    come out as exactly 0. NaN stays NaN and is no part of the statistics.
    """
    x = torch.where(mask, x.detach().double(), 0.0)
    known = x[mask & ~x.isnan()]
    if not known.numel():
        return x
    # clamped: rounding must not carry the mean of equal values past them, a difference of 0 is exactly 0
    mean = known.mean().clamp(known.min(), known.max())
    scale = torch.rsqrt(known.var() + WHITEN_EPS) if known.numel() > 1 else torch.ones_like(mean)
    return torch.where(mask, (x - mean) * scale, 0.0)


def always_whitened(found: Tensor, trained: Tensor) -> Tensor:
    """Whiten advantages over the tokens that are trained on."""
    return whiten(found, trained)


@advantage(
    "reinforce-pp",
    formula="A = whiten(returns)",
    source="REINFORCE++, Hu et al. 2025",
    layout="lines",
    finish=always_whitened,
)
def reinforce_pp(rewards: Tensor, mask: Tensor, *, gamma: Fraction = 1.0) -> Tensor:
    """REINFORCE++: returns, then whitened over all trained tokens of the batch (Hu et al. 2025, arXiv 2501.03262).

    The paper's KL penalty per token belongs into `rewards`, at sampled tokens only: at others it would be settled with
    the rest (slime's returns once contained the KL of tool results).
    """
    return returns_to_go(rewards, mask, gamma=gamma)


def path_variance(logprobs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    """The weights of `optimal_baseline`: `W_t`, the sum over sampled `j <= t` of `1 - 2 pi_j + sum_v pi_j(v)^2`.

    A summand is the squared norm of the gradient of `log pi_j` by the logits, the logit-gradient proxy of Li et al.
    (arXiv 2602.07078). verl can multiply each by its squared, truncated importance ratio old / mu; this does not.
    `logprobs` are under the policy that the gradient is taken at, `sum_pi_squared` is over its vocabulary.
    """
    pi = logprobs.detach().double().exp()
    # not negative but for the rounding of probabilities near 1
    energy = (1 - 2 * pi + sum_pi_squared.detach().double()).clamp(min=0)
    return torch.where(mask, torch.where(mask, energy, 0.0).cumsum(-1), 0.0)


def optimal_baseline(
    returns: Tensor, weights: Tensor, mask: Tensor, groups: Tensor, *, zero_tail: bool = True
) -> Tensor:
    """Optimal token baseline: `A_t = G_t - B_t`, `B_t = sum_i G_it W_it / sum_i W_it` (Li et al. 2026).

    arXiv 2602.07078. The sum is over the rows of a group, of int64 `[B]`, at the same step. A step is a sampled token:
    the t-th of one row is compared with the t-th of the others, as in verl's tir_optimal_token_baseline; its
    optimal_token_baseline compares columns, which tool results push apart. Where all weights are 0 the baseline is the
    plain mean. A group of a single row has advantage 0, there is nothing to compare with; verl gives it its return. A
    row with NaN among its returns is not scored and takes no part there.

    `zero_tail` is about steps that only one row of its group reached. True is verl's default (handle_zero_tail):
    baseline 0, the advantage is the return. False: baseline its own return, advantage 0.
    """
    returns, weights = returns.detach().double(), weights.detach().double()
    scored = mask & ~returns.isnan()
    ids, group = torch.unique(groups, return_inverse=True)
    width = mask.shape[-1]
    step = (mask.cumsum(-1) - 1).clamp(min=0)
    cell = group[:, None] * width + step
    at, g, w = cell[scored], returns[scored], weights[scored]
    nothing = returns.new_zeros(len(ids) * width)
    count = nothing.index_add(0, at, torch.ones_like(g))
    energy = nothing.index_add(0, at, w)
    plain = nothing.index_add(0, at, g) / count.clamp(min=1)
    baseline = torch.where(energy == 0, plain, nothing.index_add(0, at, g * w) / energy)
    # clamped as in whiten
    low = nothing.scatter_reduce(0, at, g, "amin", include_self=False)
    high = nothing.scatter_reduce(0, at, g, "amax", include_self=False)
    baseline = baseline.clamp(low, high)
    if zero_tail:
        rows = torch.zeros_like(ids).index_add(0, group, scored.any(-1).to(ids.dtype))
        baseline = torch.where((count == 1) & (rows > 1).repeat_interleave(width), 0.0, baseline)
    return torch.where(mask, returns - baseline[cell], 0.0)


@advantage(
    "optimal-baseline",
    formula="A_t = G_t - sum_group(W_t G_t) / sum_group W_t, W_t = sum_{j<=t} 1 - 2 pi_j + sum_v pi_j(v)^2 under old",
    source="Optimal token baseline, Li et al. 2026, 2602.07078",
    layout="groups",
)
def over_optimal_baseline(
    rewards: Tensor,
    mask: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
    scores: Tensor,
    groups: Tensor,
    episode: Tensor,
    *,
    gamma: Fraction = 1.0,
    zero_tail: bool = True,
) -> Tensor:
    """Returns minus `optimal_baseline`, within the episodes of a group; an episode without a score takes no part."""
    unscored = scores.isnan()[episode, None]
    returns = returns_to_go(rewards, mask, gamma=gamma).masked_fill(unscored, torch.nan)
    weights = path_variance(old_logprobs, sum_pi_squared, mask)
    return optimal_baseline(returns, weights, mask, groups[episode], zero_tail=zero_tail)


def _scan(x: Tensor, decay: Tensor) -> Tensor:
    """Return `y_t = x_t + decay_t y_{t+1}` along the last dimension, in log2(T) steps of doubling reach."""
    reach = 1
    while reach < x.shape[-1]:
        x = x + decay * torch.nn.functional.pad(x[..., reach:], (0, reach))
        decay = decay * torch.nn.functional.pad(decay[..., reach:], (0, reach))
        reach *= 2
    return x
