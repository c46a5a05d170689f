"""Routing of a mixture of experts: which routes the trainer replays, and how far they differ from the rollout's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agent_rl.config import Section
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class RoutingConfig(Section):
    """The remedy for experts on which rollout and training disagree; for a mixture of experts only."""

    replay: Literal["none", "R2", "R3"] = "none"
    """R2: the update takes the routes of old's own forward pass, so that they stay the same over several updates
    ("Routing Replay" in GSPO, Zheng et al. 2025, sec. 5.3; the name is from MiniRL, arXiv:2512.01374). R3: old's
    forward pass and the update take the rollout's (Ma et al. 2025, arXiv:2510.11370), so that both run through the
    experts that the tokens were sampled with."""
    min_agreement: float = Field(0.0, ge=0, le=1)
    """Tokens weigh 0 if fewer of the layers took the same experts in both; 1 keeps those without any difference."""


def replayed_routes(replay: str, rollout: Tensor | None, old: Tensor | None) -> Tensor:
    """Return the routes that the update takes with `RoutingConfig.replay`, `[B, T, layers, top_k]`.

    Raises:
        ConfigError: if rollout, or old's forward pass, did not report them.
    """
    routes = old if replay == "R2" else rollout
    if routes is None:
        whose = "old's forward pass" if replay == "R2" else "the rollout"
        raise ConfigError(f"routing.replay={replay} needs the routes of {whose}, which reported none: is it a MoE?")
    return routes


@dataclass(frozen=True, slots=True)
class RouteAgreement:
    """How far the routes of rollout and old agree, in a hundredth of their size."""

    tokens: Tensor
    """float32 `[B, T]`, or `[N]` of a batch, see `token_agreement`; read at sampled tokens only."""
    shared: Tensor
    """float64 `[B, layers]`: the share of the top-k experts that both took, summed over a row's sampled tokens."""
    known: Tensor
    """float64 `[B, layers]`: of how many tokens that is known."""

    @classmethod
    def of(cls, rollout: Tensor, old: Tensor, mask: Tensor) -> RouteAgreement:
        """Compare routes `[B, T, layers, top_k]` at the positions that the tokens of a mask `[B, T]` come from."""
        by_layer = route_agreement(rollout, old)
        tokens = token_agreement(by_layer)
        at = by_layer.roll(1, 1).double()  # a token is sampled from the position before it
        at = torch.where((mask & ~tokens.isnan())[..., None], at, torch.nan)
        return cls(tokens, at.nansum(1), (~at.isnan()).sum(1).double())


def routing_metrics(agreement: RouteAgreement | None, gaps: Tensor, mask: Tensor, rows: Tensor) -> dict[str, float]:
    """Measure how far the routes of rollout and old differ, at the positions that tokens were sampled from.

    - `routing/agreement`, `routing/agreement_layer_N`: the mean share of the top-k experts that both took.
    - `routing/flipped_tokens`: the share of tokens with another expert in any layer.
    - `mismatch/gap_flipped`, `mismatch/gap_same`: the mean |log old/mu| of those tokens, and of the others.

    With R3, old's own routes are those that its routers would have taken, given what the replayed layers below them
    computed. Flips earlier in the context, which a token sees through attention, are not looked at. What there are no
    tokens of is left out, and all of it for a dense model.

    Args:
        agreement: of rollout and old; None for a dense model.
        gaps: log old/mu, in the shape of the agreement of tokens.
        mask: the tokens to measure, bool: of each row all sampled ones, or none.
        rows: bool `[B]`: the rows with tokens to measure.
    """
    if agreement is None:
        return {}
    known = mask & ~agreement.tokens.isnan()
    if not known.any():
        return {}
    shared, tokens = agreement.shared[rows].sum(0), agreement.known[rows].sum(0)
    flipped = agreement.tokens[known] < 1
    gap = gaps[known].abs()
    found = {"routing/agreement": shared.sum() / tokens.sum(), "routing/flipped_tokens": flipped.double().mean()}
    found |= {f"routing/agreement_layer_{i}": layer for i, layer in enumerate(shared / tokens)}
    if flipped.any():
        found["mismatch/gap_flipped"] = gap[flipped].mean()
    if not flipped.all():
        found["mismatch/gap_same"] = gap[~flipped].mean()
    return {name: float(value) for name, value in found.items() if not torch.isnan(value)}


def route_agreement(rollout_experts: Tensor, training_experts: Tensor) -> Tensor:
    """Return the share of the top-k experts that both engines took, in any order, float32 `[B, T, layers]`.

    Experts are distinct ids, int `[B, T, layers, top_k]`, by input position; the share is NaN where either side misses
    any, a -1.

    Raises:
        ConfigError: if the shapes differ.
    """
    if rollout_experts.shape != training_experts.shape:
        raise ConfigError(
            f"routed experts are {tuple(rollout_experts.shape)} in the rollout and {tuple(training_experts.shape)} in "
            "training: serve and train the same model"
        )
    top_k = rollout_experts.shape[-1]
    shared = torch.zeros(rollout_experts.shape[:-1], device=rollout_experts.device)
    for k in range(top_k):  # all pairs at once would be top_k times the size of the routes
        shared += (rollout_experts[..., k : k + 1] == training_experts).any(-1)
    missing = (rollout_experts < 0).any(-1) | (training_experts < 0).any(-1)
    return torch.where(missing, torch.nan, shared / top_k)


def token_agreement(routes: Tensor) -> Tensor:
    """Return the share of layers with equal experts at the position that each token was sampled from, `[B, T]`.

    Token t is sampled from the output at position t - 1, so that `route_agreement`'s input positions move by one. NaN
    where no layer is known, and for the first token; layers that are not known take no part.
    """
    same = torch.where(routes.isnan(), torch.nan, (routes == 1).to(routes.dtype)).nanmean(-1)
    return torch.cat([torch.full_like(same[:, :1], torch.nan), same[:, :-1]], -1)
