"""Aggregation: losses of tokens → one number, with the denominators of the whole batch.

Each function returns a share of the batch's loss: the shares of all micro-batches add up to it, however it was cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agent_rl.algorithms.batch import Denominators


def token_mean(loss: Tensor, mask: Tensor, whole: Denominators) -> Tensor:
    """Every sampled token of the batch counts the same (DAPO, Yu et al. 2025)."""
    return _masked(loss, mask).sum() / whole.tokens


def seq_mean_token_sum(loss: Tensor, mask: Tensor, whole: Denominators) -> Tensor:
    """Every sequence counts by its length: the sum over its tokens, averaged over sequences."""
    return _masked(loss, mask).sum() / whole.sequences


def seq_mean_token_mean(loss: Tensor, mask: Tensor, whole: Denominators) -> Tensor:
    """Every sequence counts the same, however long (the original GRPO, Shao et al. 2024, eq. 3)."""
    means = _masked(loss, mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return means.sum() / whole.sequences


def _masked(loss: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: a NaN outside the mask must not reach the sum, nor its gradient
    return torch.where(mask, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Denominators], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
}
"""By the names that verl uses."""
