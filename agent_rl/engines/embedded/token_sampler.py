"""Logits → sampled ids with their log-probabilities, one uniform draw per token and sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.device import float64_device
from agent_rl.errors import PolicyError


def sample(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw one token a row of `[B, V]` by inverting its cumulative distribution at a uniform draw from [0, 1).

    Returns:
        ids int64 `[B]` and their log-probabilities under the sampling distribution, float32 `[B]`, in nats: 0 for
        greedy rows, a point mass.

    Raises:
        PolicyError: if a row's logits have no softmax (a NaN or +inf among them).
    """
    logits = logits.to(float64_device(logits.device), torch.float32)
    bad = int((~logits.amax(-1).isfinite()).sum())
    if bad:
        raise PolicyError(f"{bad} of {len(logits)} rows of logits hold NaN or infinity: have the weights diverged?")
    sampled_from = _restrict(logits, params)
    cumulative = sampled_from.exp().double().cumsum(-1)
    target = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    # right=True: the first id whose cumulative mass exceeds the target, which can't be one of mass 0
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    if greedy:
        ids[greedy] = logits[greedy].argmax(-1)
    logprobs = sampled_from.gather(1, ids[:, None])[:, 0]
    if greedy:
        logprobs[greedy] = 0.0
    return ids, logprobs


def _restrict(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, min-p, top-k and top-p in vLLM's order; return normalised log-probabilities."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    if any(p.temperature not in (0, 1) for p in params):
        logits = logits / column([p.temperature or 1.0 for p in params])
    softmax = torch.log_softmax(logits, -1)
    if not any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        return softmax
    ordered, order = softmax.sort(-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = ordered.exp() >= column([p.min_p for p in params]) * ordered[:, :1].exp()
    keep &= rank < column([float(p.top_k or logits.shape[-1]) for p in params])
    ordered = torch.log_softmax(ordered.masked_fill(~keep, float("-inf")), -1)
    before = ordered.exp().cumsum(-1) - ordered.exp()  # the mass of the likelier tokens
    keep &= (before < column([p.top_p for p in params])) | (rank == 0)
    restricted = torch.full_like(logits, float("-inf")).scatter(1, order, ordered.masked_fill(~keep, float("-inf")))
    return torch.log_softmax(restricted, -1)
