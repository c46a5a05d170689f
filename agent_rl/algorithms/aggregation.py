"""Aggregation: losses of tokens → one number, with the denominators of the whole batch.

Each function returns a share of the batch's loss: the shares of all micro-batches add up to it, however it was cut.
`mask` says which tokens count, `[B, T]`; `whole` has the counts of the whole batch; names are verl's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_rl.algorithms.components import Count, aggregation
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from agent_rl.algorithms.batch import Denominators


@aggregation("token-mean", formula="sum over tokens / tokens of the batch", source="DAPO, Yu et al. 2025, eq. 8")
def token_mean(loss: Tensor, mask: Tensor, whole: Denominators) -> Tensor:
    """Every sampled token of the batch counts the same."""
    return _masked(loss, mask).sum() / whole.tokens


@aggregation("token-sum", formula="sum over tokens", source="verl")
def token_sum(loss: Tensor, mask: Tensor) -> Tensor:
    """The plain sum: the size of the step grows with the batch."""
    return _masked(loss, mask).sum()


@aggregation("seq-mean-token-sum", formula="mean over episodes of the sum over tokens", source="REINFORCE")
def seq_mean_token_sum(loss: Tensor, mask: Tensor, whole: Denominators) -> Tensor:
    """Every sequence counts by its length: the sum over its tokens, averaged over sequences."""
    return _masked(loss, mask).sum() / whole.sequences


@aggregation(
    "seq-mean-token-mean", formula="mean over episodes of the mean over tokens", source="GRPO, Shao et al. 2024, eq. 3"
)
def seq_mean_token_mean(loss: Tensor, mask: Tensor, whole: Denominators, sequence_tokens: Tensor) -> Tensor:
    """Every sequence counts the same, however long: the original GRPO.

    A sequence is an episode: `sequence_tokens`, `[B]`, are the counted tokens of all rows of a row's episode.
    """
    means = _masked(loss, mask).sum(-1) / sequence_tokens.clamp(min=1)
    return means.sum() / whole.sequences


@aggregation(
    "prompt-mean",
    formula="mean over prompts of the mean over their tokens",
    source="ScaleRL, Khatri et al. 2025, section 4",
)
def prompt_mean(loss: Tensor, mask: Tensor, prompt_shares: Tensor) -> Tensor:
    """Every prompt counts the same, and so does every token of its episodes.

    `prompt_shares` are those rows of `shares_of_prompts` of the whole batch: the mask of a micro-batch does not tell
    how large its prompts are.
    """
    return (_masked(loss, mask) * prompt_shares[:, None]).sum()


def shares_of_prompts(tokens_of_rows: Tensor, prompts: Tensor) -> Tensor:
    """Return what a counted token of each row counts in the mean over prompts, float32 `[B]`, from their number `[B]`.

    That is `1 / (n |q|)` where n prompts have counted tokens and the row's prompt q has |q|; 0 for a prompt without.
    Rows with the same number in `prompts`, int64 `[B]`, are answers to the same one.
    """
    ids, index = torch.unique(prompts, return_inverse=True)
    tokens = torch.zeros(ids.shape, device=tokens_of_rows.device).index_add(0, index, tokens_of_rows.float())
    shares = 1 / (tokens.clamp(min=1) * (tokens > 0).sum().clamp(min=1))
    return torch.where(tokens > 0, shares, 0.0)[index]


@aggregation(
    "seq-mean-token-sum-norm",
    formula="mean over episodes of the sum over tokens / length",
    source="Dr. GRPO, Liu et al. 2025",
)
def seq_mean_token_sum_norm(loss: Tensor, mask: Tensor, whole: Denominators, *, length: Count) -> Tensor:
    """The sum over a sequence's tokens divided by a constant, averaged over sequences.

    `length` is the most tokens that an episode may sample. verl falls back to the padded width, which makes the loss
    depend on who shares the batch.
    """
    return _masked(loss, mask).sum() / (whole.sequences * length)


def tokens_of_sequences(tokens_of_rows: Tensor, episode: Tensor) -> Tensor:
    """Return the counted tokens of each row's episode, float32 `[B]`, from those of the rows, `[B]`."""
    ids, index = torch.unique(episode, return_inverse=True)
    return torch.zeros(ids.shape, device=episode.device).index_add(0, index, tokens_of_rows.float())[index]


def _masked(loss: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: a NaN outside the mask must not reach the sum, nor its gradient
    return torch.where(mask, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))
