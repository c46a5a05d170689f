"""Routing of a mixture of experts: which routes the trainer replays, and how far they differ from the rollout's."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.algorithms.batch import Batch
from agent_rl.algorithms.corrections import log_ratio
from agent_rl.algorithms.diagnostics import route_agreement, token_agreement
from agent_rl.config import Section
from agent_rl.errors import ConfigError


class RoutingConfig(Section):
    """What is done about experts that rollout and training don't agree on; for a mixture of experts only."""

    replay: Literal["none", "R2", "R3"] = "none"
    """R2: the update takes the routes of old's own forward pass, so that they stay the same over several updates
    ("Routing Replay" in GSPO, Zheng et al. 2025, sec. 5.3; the name is from MiniRL, arXiv:2512.01374). R3: old's
    forward pass and the update take the rollout's (Ma et al. 2025, arXiv:2510.11370), so that both run through the
    experts that the tokens were sampled with."""
    min_agreement: float = Field(0.0, ge=0, le=1)
    """Tokens weigh 0 if fewer of the layers took the same experts in both; 1 keeps those without any difference."""


def replayed_routes(batch: Batch, replay: str) -> Tensor | None:
    """Return the routes that the update takes, `[B, T, layers, top_k]`; None if the model routes for itself.

    Raises:
        ConfigError: if they are not known.
    """
    if replay == "none":
        return None
    routes = batch.old_experts if replay == "R2" else batch.routed_experts
    if routes is None:
        whose = "old's forward pass" if replay == "R2" else "the rollout"
        raise ConfigError(f"routing.replay={replay} needs the routes of {whose}, which reported none: is it a MoE?")
    return routes


def agreement_of(batch: Batch) -> Tensor:
    """Return the share of layers that took the same experts in rollout and training, `[B, T]`, by sampled token.

    See `mismatch.token_agreement`.

    Raises:
        ConfigError: if either side's routes are not known.
    """
    if batch.routed_experts is None or batch.old_experts is None:
        raise ConfigError("routing.min_agreement needs the routes of a mixture of experts: set it to 0 otherwise")
    return token_agreement(route_agreement(batch.routed_experts, batch.old_experts))


def routing_metrics(batch: Batch, mask: Tensor) -> dict[str, float]:
    """Measure how far the routes of rollout and old differ, at the positions that tokens were sampled from.

    - `routing/agreement`, `routing/agreement_layer_N`: the mean share of the top-k experts that both took.
    - `routing/flipped_tokens`: the share of tokens with another expert in any layer.
    - `mismatch/gap_flipped`, `mismatch/gap_same`: the mean |log old/mu| of those tokens, and of the others.

    With R3, old's own routes are those that its routers would have taken, given what the replayed layers below them
    computed. Flips earlier in the context, which a token sees through attention, are not looked at.

    Args:
        batch: with the log-probabilities and routes of old.
        mask: the tokens to measure, bool `[B, T]`.

    Returns:
        Nothing for a dense model; without the metrics of tokens that there are none of.
    """
    if batch.routed_experts is None or batch.old_experts is None:
        return {}
    shared = route_agreement(batch.routed_experts, batch.old_experts)
    whole = token_agreement(shared)
    known = mask & ~whole.isnan()
    if not known.any():
        return {}
    at = shared.roll(1, 1)[known].double()  # a token is sampled from the position before it
    flipped = whole[known] < 1
    gap = log_ratio(batch.old_logprobs, batch.rollout_logprobs, mask)[known].abs()
    found = {"routing/agreement": at.nanmean(), "routing/flipped_tokens": flipped.double().mean()}
    found |= {f"routing/agreement_layer_{i}": layer.nanmean() for i, layer in enumerate(at.unbind(-1))}
    if flipped.any():
        found["mismatch/gap_flipped"] = gap[flipped].mean()
    if not flipped.all():
        found["mismatch/gap_same"] = gap[~flipped].mean()
    return {name: float(value) for name, value in found.items() if not torch.isnan(value)}
