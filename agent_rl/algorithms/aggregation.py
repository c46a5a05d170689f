"""Aggregation: losses of tokens → one number, with the denominators of the whole batch.

Each function returns a share of the batch's loss: the shares of all micro-batches add up to it, however it was cut.
`mask` says which tokens count, `[B, T]`; names are verl's. `shares` is for the mean over prompts alone: what else a row
must know of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_rl.algorithms.batch import Denominators
from agent_rl.algorithms.components import Component, ComponentRegistry, Count
from agent_rl.errors import ConfigError


def token_mean(loss: Tensor, mask: Tensor, whole: Denominators, shares: Tensor | None = None) -> Tensor:
    """Every sampled token of the batch counts the same (DAPO, Yu et al. 2025, eq. 8)."""
    return _masked(loss, mask).sum() / whole.tokens


def token_sum(loss: Tensor, mask: Tensor, whole: Denominators, shares: Tensor | None = None) -> Tensor:
    """The plain sum: the size of the step grows with the batch."""
    return _masked(loss, mask).sum()


def seq_mean_token_sum(loss: Tensor, mask: Tensor, whole: Denominators, shares: Tensor | None = None) -> Tensor:
    """Every sequence counts by its length: the sum over its tokens, averaged over sequences."""
    return _masked(loss, mask).sum() / whole.sequences


def seq_mean_token_mean(loss: Tensor, mask: Tensor, whole: Denominators, shares: Tensor | None = None) -> Tensor:
    """Every sequence counts the same, however long (the original GRPO, Shao et al. 2024, eq. 3)."""
    means = _masked(loss, mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return means.sum() / whole.sequences


def prompt_mean(loss: Tensor, mask: Tensor, whole: Denominators, shares: Tensor | None = None) -> Tensor:
    """Every prompt counts the same, and so does every token of its episodes (ScaleRL, Khatri et al. 2025, section 4).

    Args:
        loss: `[B, T]`.
        mask: `[B, T]`.
        whole: counts over the whole batch.
        shares: what each counted token of a row counts, `[B]`: those rows of `prompt_shares` over the whole batch.

    Raises:
        ConfigError: without shares: the mask of a micro-batch does not tell how large its prompts are.
    """
    if shares is None:
        raise ConfigError("prompt-mean needs each row's share of its prompt: pass the rows' prompt_shares")
    return (_masked(loss, mask) * shares[:, None]).sum()


def prompt_shares(counted: Tensor, prompts: Tensor) -> Tensor:
    """Return what a counted token of each row counts in the mean over prompts, float32 `[B]`.

    That is `1 / (n |q|)` where n prompts have counted tokens and the row's prompt q has |q|; 0 for a prompt without.

    Args:
        counted: bool `[B, T]`, of the whole batch.
        prompts: int64 `[B]`: rows with the same number are answers to the same prompt.
    """
    ids, index = torch.unique(prompts, return_inverse=True)
    tokens = torch.zeros(ids.shape, device=counted.device).index_add(0, index, counted.sum(-1).float())
    shares = 1 / (tokens.clamp(min=1) * (tokens > 0).sum().clamp(min=1))
    return torch.where(tokens > 0, shares, 0.0)[index]


def seq_mean_token_sum_norm(
    loss: Tensor, mask: Tensor, whole: Denominators, shares: Tensor | None = None, *, length: Count
) -> Tensor:
    """The sum over a sequence's tokens divided by a constant, averaged over sequences (Dr. GRPO, Liu et al. 2025).

    Args:
        loss: `[B, T]`.
        mask: `[B, T]`.
        whole: counts over the whole batch.
        shares: not used.
        length: the constant, the most tokens that an episode may sample. verl falls back to the padded width, which
            makes the loss depend on who shares the batch.
    """
    return _masked(loss, mask).sum() / (whole.sequences * length)


def _masked(loss: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: a NaN outside the mask must not reach the sum, nor its gradient
    return torch.where(mask, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))


AGGREGATIONS = ComponentRegistry(
    "aggregation",
    {
        "token-mean": Component(token_mean, "sum over tokens / tokens of the batch", "DAPO, Yu et al. 2025, eq. 8"),
        "token-sum": Component(token_sum, "sum over tokens", "verl"),
        "seq-mean-token-sum": Component(seq_mean_token_sum, "mean over rows of the sum over tokens", "REINFORCE"),
        "seq-mean-token-mean": Component(
            seq_mean_token_mean, "mean over rows of the mean over tokens", "GRPO, Shao et al. 2024, eq. 3"
        ),
        "seq-mean-token-sum-norm": Component(
            seq_mean_token_sum_norm, "mean over rows of the sum over tokens / length", "Dr. GRPO, Liu et al. 2025"
        ),
        "prompt-mean": Component(
            prompt_mean, "mean over prompts of the mean over their tokens", "ScaleRL, Khatri et al. 2025, section 4"
        ),
    },
)
