"""Corrections for the gap between the policy that sampled (mu) and the one the trainer starts from (old)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def none(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """No correction: every token weighs 1."""
    return torch.ones_like(old_logprobs)


def token_tis(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """Truncated importance sampling per token: `min(old / mu, cap)`, without gradient (Yao et al. 2025)."""
    return (old_logprobs - rollout_logprobs).clamp(max=20.0).exp().clamp(max=cap).detach()


CORRECTIONS: dict[str, Callable[..., Tensor]] = {"none": none, "token-tis": token_tis}
"""Each maps the log-probabilities under old and mu, `[B, T]`, to a weight per token."""
