"""The training forward: log-probabilities of a padded batch's tokens under the model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def token_logprobs(
    model: PreTrainedModel, token_ids: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Score every token given those before it.

    Padding on the right needs no attention mask: a causal model's real tokens don't see it.

    Args:
        model: a causal LM.
        token_ids: int64 `[B, T]`.
        temperature: that of the sampling distribution; greedy (0) scores like 1.
        entropy_gradient: let the entropies have a gradient, too.

    Returns:
        Log-probabilities in nats and entropies of the distribution that each token was drawn from, float32 `[B, T]`;
        the first column, which nothing predicts, is 0.
    """
    logits = model(input_ids=token_ids[:, :-1]).logits.float() / (temperature or 1.0)
    normalised = torch.log_softmax(logits, -1)
    chosen = normalised.gather(-1, token_ids[:, 1:, None])[..., 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(normalised.exp() * normalised).sum(-1)
    first = torch.zeros_like(chosen[:, :1])
    return torch.cat([first, chosen], 1), torch.cat([first, entropy], 1)
