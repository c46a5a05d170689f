"""Objectives: the loss of each sampled token.

Three policies may be involved: `mu` sampled the tokens, `old` is the proximal policy that clipping is relative to, and
`theta` is being trained. Every ratio here is theta / old.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exponentiation, so that one absurd token can't make the loss infinite."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token and what it says about the update; all `[B, T]`, not yet masked."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """bool: where the clipped branch decided."""


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low_eps: float, clip_high_eps: float
) -> TokenLoss:
    """PPO's clipped surrogate, `max(-A r, -A clip(r, 1 - low, 1 + high))` (Schulman et al. 2017, eq. 7).

    With `clip_high_eps > clip_low_eps` it is DAPO's clip-higher (Yu et al. 2025, eq. 8).

    Args:
        logprobs: of the tokens under theta, `[B, T]`, with gradient.
        old_logprobs: under old, `[B, T]`.
        advantages: `[B, T]`.
        clip_low_eps: the ratio is clipped below at `1 - clip_low_eps`.
        clip_high_eps: the ratio is clipped above at `1 + clip_high_eps`.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low_eps, 1 + clip_high_eps)
    return TokenLoss(torch.maximum(plain, clipped), ratio.detach(), (clipped > plain).detach())
