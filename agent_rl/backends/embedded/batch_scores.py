"""Batch scores: what a model says about a whole batch, in micro-batches and without gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.algorithms import Batch
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.moe.balance import RouteLog
from agent_rl.moe.routes import routed


@torch.no_grad()
def score_batch(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    *names: str,
    given: Tensor | None = None,
    log: RouteLog | None = None,
) -> list[Tensor]:
    """Return some of a model's `Scores` of the whole batch, each float32 `[B, T]`; 0 outside the mask.

    Args:
        model: whose scores.
        batch: the rows.
        config: temperature, precision and the size of micro-batches.
        names: which scores.
        given: routes that a mixture of experts takes, `[B, T, layers, top_k]`.
        log: is told the routes that it would have taken.
    """
    whole = [torch.zeros_like(batch.rollout_logprobs) for _ in names]
    for rows in batch.cut_rows(config.micro_batch_tokens):
        part = batch.rows(rows)
        with routed(model, None if given is None else given[rows, : part.token_ids.shape[1]]) as routes:
            scores = score_tokens(model, part.token_ids, config.rollout.temperature, precision=config.precision)
        if log is not None:
            log.add(rows, routes)
        for out, name in zip(whole, names, strict=True):
            values = getattr(scores, name)
            out[rows, : values.shape[1]] = torch.where(part.loss_mask, values, values.new_zeros(()))
    return whole
