"""Objectives over the whole batch: what each token's loss is hangs on other rows, and on theta.

Before every update the whole batch is scored under theta. From that, the objective's function fills arrays of the batch
that micro-batches carry, so that the loss of each token is its own again, and the gradient does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.algorithms.batch import Batch
from agent_rl.algorithms.components import Component, Positive
from agent_rl.algorithms.objectives import preference
from agent_rl.algorithms.objectives.base import TokenLoss
from agent_rl.algorithms.objectives.token import m2po_keep

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch that is ready for one update, and what there is to report about it."""

    batch: Batch
    metrics: dict[str, float]


@dataclass(frozen=True)
class BatchObjective(Component[TokenLoss | PreparedBatch]):
    """An objective over the whole batch: its function prepares the batch, `(theta, batch) -> Prepared`."""

    token_loss: Callable[..., TokenLoss]
    """The loss of each token of a prepared batch."""


def m2po(theta: Tensor, batch: Batch, *, second_moment: Positive = 0.04) -> PreparedBatch:
    """Mask out M2PO's tokens: their weights become 0 (Zheng et al. 2025, arXiv 2510.01161, algorithm 1).

    Args:
        theta: log-probabilities of the whole batch, `[B, T]`; anything outside the mask.
        batch: all rows that have a gradient.
        second_moment: see `m2po_keep`.
    """
    mask = batch.loss_mask
    theta, mu = (torch.where(mask, x, x.new_zeros(())) for x in (theta, batch.rollout_logprobs))
    keep = m2po_keep(theta, mu, batch.advantages, mask, second_moment=second_moment)
    masked = float((mask & ~keep).sum()) / max(1, int(mask.sum()))
    weights = torch.where(keep, batch.weights, batch.weights.new_zeros(()))
    return PreparedBatch(replace(batch, weights=weights), {"train/clip_fraction": masked})


def dpo(theta: Tensor, batch: Batch, *, beta: Positive = 0.1, label_smoothing: Smoothing = 0.0) -> PreparedBatch:
    """Replace advantages by the downhill slope of DPO's mean loss, with which a policy gradient takes the same step.

    The rows of a group are a pair: those of advantage above 0 are of its better episode, those below 0 of its worse
    one. DPO's gradient is `-beta sigmoid(-m)` times that of log theta of the better less that of the worse (Rafailov et
    al. 2023, under eq. 7): the pair's rows need each other for the number m only, not for their gradients.

    Args:
        theta: log-probabilities of the whole batch, `[B, T]`; anything outside the mask.
        batch: all rows of all pairs, with the reference's log-probabilities.
        beta: see `preference.dpo`.
        label_smoothing: see `preference.dpo`.

    Returns:
        The batch and, under TRL's names, means over pairs.
    """
    number, pair = torch.unique(batch.group, return_inverse=True)
    worse = (batch.advantages < 0).any(-1).long()

    def by_pair(rows: Tensor) -> tuple[Tensor, Tensor]:
        better_and_worse = rows.new_zeros(2 * len(number)).index_add(0, pair + len(number) * worse, rows)
        chosen, rejected = better_and_worse.chunk(2)
        return chosen, rejected

    with torch.enable_grad():  # by theta's numbers, not by the weights behind them
        leaf = theta.detach().double().requires_grad_()
        chosen, rejected = by_pair(preference.sequence_logprob(leaf, batch.loss_mask))
        references = by_pair(preference.sequence_logprob(batch.reference_logprobs, batch.loss_mask))
        loss, margin = preference.dpo(chosen, rejected, *references, beta=beta, label_smoothing=label_smoothing)
        (slope,) = torch.autograd.grad(loss.mean(), leaf)
    metrics = {
        "train/loss": loss,
        "rewards/chosen": beta * (chosen - references[0]),
        "rewards/rejected": beta * (rejected - references[1]),
        "rewards/margins": margin,
        "rewards/accuracies": (margin > 0).double(),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    means = {name: float(values.detach().mean()) for name, values in metrics.items()}
    advantages = (-slope).to(batch.advantages.dtype)
    return PreparedBatch(replace(batch, advantages=advantages), means | {"train/pairs": float(len(number))})
