"""KL penalties: how far theta is from a reference policy, per sampled token, in the loss or in the reward.

All estimate the reverse KL, `KL(theta || reference)`, from one token that theta sampled (Schulman 2020, "Approximating
KL Divergence"). What they are worth as a reward and as a loss differs: below, x is the token's log-probability under
theta minus that under the reference, and "gradient" is what it is in expectation over tokens that theta samples.

| kind  | value           | expected value | expected gradient                                    | verl       |
|-------|-----------------|----------------|------------------------------------------------------|------------|
| `k1`  | x               | the KL         | zero: no use in a loss                               | kl         |
| `k2`  | x^2 / 2         | biased         | the KL's                                             | mse        |
| `k3`  | exp(-x) - 1 + x | the KL         | another's: the forward KL's, from reference to theta | low_var_kl |
| `k1+` | k1              | the KL         | the KL's: straight-through, the gradient is k2's     | k1+        |
| `k3+` | k3              | the KL         | the KL's: straight-through, the gradient is k2's     | k3+        |
| `abs` | abs(x)          | biased         | another's: twice that of the total variation         | abs        |

For tokens that another policy sampled none of this holds, and `unbiased_kl` is the one for a loss. All of it is about
one position at a time: in a loss, nothing is charged for leading into states where later tokens are far from the
reference. `kl_in_reward` does charge for it, as the penalties of later tokens are part of an earlier one's return
(Shah et al. 2025, "A Comedy of Estimators").

Clamps: k1, k2 and abs have none. k3's are verl's: x to ± `MAX_LOG_RATIO` and the value to `MAX_K3`, beyond which its
gradient is zero; TRL has none. k3+ keeps k2's gradient there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from agent_rl.algorithms.objectives.base import log_ratio
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "k1+", "k3+", "abs"]

MAX_K3 = 10.0
"""k3 is at most this, which it reaches at x = -2.6 (the reference rates a token 14 times as high) and at x = 11."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, *, kind: KLKind) -> Tensor:
    """Estimate `KL(theta || reference)` at each token, `[B, T]`; the module's docstring has the table.

    Where nothing was sampled the caller has put zeros in both, as for every objective.

    Raises:
        ConfigError: for a kind that doesn't exist.
    """
    if kind not in get_args(KLKind):
        raise ConfigError(
            f"no KL estimator {kind!r}; there are {', '.join(get_args(KLKind))} (verl's kl, mse and low_var_kl are k1, "
            "k2 and k3)"
        )
    x = logprobs - reference_logprobs.to(logprobs)
    if kind in ("k2", "abs"):
        return _k2(x) if kind == "k2" else x.abs()
    value = x if kind.startswith("k1") else _k3(logprobs, reference_logprobs).clamp(max=MAX_K3)
    return _with_gradient_of(_k2(x), value) if kind.endswith("+") else value


def unbiased_kl(logprobs: Tensor, behavior_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate the KL at tokens that another policy sampled: `r k3`, r = theta / behavior, `[B, T]`.

    Both its value and its gradient are, in expectation over tokens of the behavior policy, those of
    `KL(theta || reference)` (DeepSeek-AI 2025, "DeepSeek-V3.2", eq. 7; TRL's `use_bias_correction_kl`, slime's
    `use_unbiased_kl`). The ratio is differentiated, too; the two gradients add up to `r x`, and this is what is
    propagated, since that of the clamped product would push a token away from a reference that rates it much higher.

    The behavior policy is mu; old leaves out the mismatch between training and inference, as slime and TRL do. The
    log-ratios in r and k3 are clamped to ± `MAX_LOG_RATIO`; there is no `MAX_K3`, which would bias it. slime has it for
    `low_var_kl`, on the product; TRL clamps nothing, and has the sequence's r where its ratios are by sequence.
    """
    ratio = log_ratio(logprobs.detach(), behavior_logprobs.to(logprobs)).exp()
    value = ratio * _k3(logprobs, reference_logprobs)
    return _with_gradient_of(ratio * _k2(logprobs - reference_logprobs.to(logprobs)), value)


def kl_in_reward(
    rewards: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    coefficient: float,
    kind: KLKind,
) -> Tensor:
    """Return `rewards - coefficient * KL` at sampled tokens, `rewards` elsewhere; float64 `[B, T]`, without gradient.

    Tokens of the environment have no penalty: it would be added to the returns of the turns before them (slime#1370).
    InstructGPT's penalty (Ouyang et al. 2022, eq. 2) is k1, as is verl's default; a `+` changes nothing.
    Log-probabilities outside the mask may be anything.
    """
    zero = torch.zeros((), dtype=torch.float64, device=rewards.device)
    old = torch.where(mask, old_logprobs.detach().double(), zero)
    reference = torch.where(mask, reference_logprobs.detach().double(), zero)
    return rewards.detach().double() - coefficient * kl_estimate(old, reference, kind=kind)


def _k2(x: Tensor) -> Tensor:
    return 0.5 * x.square()


def _k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    x = log_ratio(logprobs, reference_logprobs.to(logprobs))
    # expm1: exp(-x) - 1 has no digit left in float32 where x is small, and can be below zero
    return torch.expm1(-x) + x


def _with_gradient_of(source: Tensor, value: Tensor) -> Tensor:
    return source - source.detach() + value.detach()
