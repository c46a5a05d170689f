"""Value loss: what the critic is trained on, and how much of the returns it explains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_eps: float | None = 0.2
) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss, `max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2`, per token.

    The half is in it, as in OpenAI's baselines and in verl's `compute_value_loss`, so a coefficient from there means
    the same here. A token's gradient is `V - R`, or zero where V has already moved from V_old towards R by more than
    `clip_eps`. The bound is in units of the return: scale it with the rewards. None for no clipping; verl's default is
    0.5.

    V has a gradient, and the loss its dtype; V_old is of the critic that the advantages are from, R the targets. All
    are `[B, T]`, and not looked at outside the mask, where the loss is 0. Also returned, bool `[B, T]`: where the
    gradient was cut off.
    """
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    new, old, target = (torch.where(mask, x.to(values.dtype), zero) for x in (values, old_values, returns))
    plain = (new - target).square()
    if clip_eps is None:
        return 0.5 * plain, torch.zeros_like(mask)
    bounded = (torch.clamp(new, old - clip_eps, old + clip_eps) - target).square()
    # not torch.maximum: where both are equal it takes half of each gradient
    clipped = (bounded > plain).detach()
    return 0.5 * torch.where(clipped, bounded, plain), clipped


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return `1 - Var(R - V) / Var(R)` over `mask`: 1 for a perfect critic, 0 for a constant one, or below.

    NaN where that has no meaning: fewer than two tokens, or returns that are all the same (to float32's precision).
    OpenAI's baselines do so, too; verl's `critic/vf_explained_var` adds 1e-5 to the denominator instead, and so is near
    1 for small returns, however poor the critic.
    """
    predicted, target = values.detach()[mask].double(), returns.detach()[mask].double()
    if not len(target) or target.max() - target.min() <= 1e-6 * target.abs().max():
        return float("nan")
    return 1 - ((target - predicted).var() / target.var()).item()


def critic_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Return how well a critic foresaw the returns that it is now trained towards, by verl's names.

    `values` are those that the advantages are from, `mask` is where the critic is trained, all `[B, T]`.
    `vf_explained_var` is left out where it has no meaning.
    """
    if not mask.any():
        return {}
    means = {
        "critic/values/mean": float(values[mask].double().mean()),
        "critic/returns/mean": float(returns[mask].double().mean()),
    }
    explained = explained_variance(values, returns, mask)
    return means if math.isnan(explained) else means | {"critic/vf_explained_var": explained}
