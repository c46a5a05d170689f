"""Scoring: what the model says about the tokens of a padded batch, with a gradient where training needs one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every token given those before it; the first column, which nothing predicts, is 0."""

    logprobs: Tensor
    """float32 `[B, T]`, in nats."""
    entropy: Tensor
    """float32 `[B, T]`, in nats, of the distribution that the token came from."""
    sum_pi_squared: Tensor
    """float32 `[B, T]`: the sum of that distribution's squared probabilities; without gradient."""
    hidden: Tensor
    """`[B, T, hidden]`: the state that the token was predicted from, after the last norm; what a value head reads."""


def score_tokens(
    model: PreTrainedModel, token_ids: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> Scores:
    """Score every token given those before it.

    Padding on the right needs no attention mask: a causal model's real tokens don't see it.

    Args:
        model: a causal LM.
        token_ids: int64 `[B, T]`.
        temperature: that of the sampling distribution; greedy (0) scores like 1.
        entropy_gradient: let the entropies have a gradient, too.
    """
    hidden = model.model(input_ids=token_ids[:, :-1]).last_hidden_state
    logits = model.lm_head(hidden).float() / (temperature or 1.0)
    normalised = torch.log_softmax(logits, -1)
    chosen = normalised.gather(-1, token_ids[:, 1:, None])[..., 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(normalised.exp() * normalised).sum(-1)
    squares = normalised.detach().mul(2).exp_().sum(-1)
    return Scores(*(_after_first(x) for x in (chosen, entropy, squares, hidden)))


def _after_first(x: Tensor) -> Tensor:
    """Put a column of zeros before the others."""
    return torch.cat([torch.zeros_like(x[:, :1]), x], 1)
