"""Routing: the routes of a mixture of experts in the training forward, replayed, recorded and kept in balance.

A router picks `top_k` experts for every input position. Rollout and training differ in their last bits, or in the
weights themselves, and where two experts are nearly equal they pick others: the token then runs through other weights.
Replaying the rollout's picks in training takes that part of the gap away (Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from agent_rl.errors import ConfigError


@dataclass(slots=True)
class Routes:
    """What the routers of a forward pass said; empty until it ran, and for a dense model."""

    logits: list[Tensor] = field(default_factory=list)
    """`[N, experts]` by layer, with gradient; `N` are the input positions, row by row."""
    own: list[Tensor] = field(default_factory=list)
    """int64 `[N, top_k]` by layer: what each router picked by itself, also where another route was replayed."""


def routers(model: PreTrainedModel) -> list[Qwen3MoeTopKRouter]:
    """Return a model's routers by layer; none for a dense model, or one whose gates are computed in another way."""
    return [m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)]


@contextmanager
def routed(model: PreTrainedModel, given: Tensor | None = None) -> Iterator[Routes]:
    """Let the forward pass inside take given routes, and record what its routers said.

    Only which experts are taken is given. Their weights come from the present router, as they would without: softmax
    over all experts, gathered at the given ones, normalised if the model does so. So the router keeps its gradient.
    One forward pass each; the hooks are gone afterwards, also after an error.

    Args:
        model: a Qwen3-MoE; for a dense model nothing happens, unless there are routes.
        given: integers `[B, T, layers, top_k]` by input position: the route of position t is that of the input token
            t. `T` may exceed what is fed, since nobody feeds the last token. A position with a -1 routes for itself.

    Raises:
        ConfigError: if the routes don't fit the model or what it is fed, or it has no routers to give them to.
    """
    layers, taken = routers(model), Routes()
    if given is not None:
        _check(given, layers)
    with ExitStack() as hooks:
        for index, router in enumerate(layers):
            routes = None if given is None else given[:, :, index]
            hooks.callback(router.register_forward_hook(_hook(taken, routes)).remove)
        yield taken


_RouterOutput = tuple[Tensor, Tensor, Tensor]


def _hook(
    taken: Routes, given: Tensor | None
) -> Callable[[nn.Module, tuple[Tensor, ...], _RouterOutput], _RouterOutput | None]:
    def hook(router: nn.Module, inputs: tuple[Tensor, ...], output: _RouterOutput) -> _RouterOutput | None:
        logits, _, own = output
        taken.logits.append(logits)
        taken.own.append(own)
        if given is None:
            return None
        rows, fed = len(given), len(own) // len(given)
        if rows * fed != len(own) or fed > given.shape[1]:
            raise ConfigError(f"routes of {tuple(given.shape[:2])} positions for {len(own)} that are fed")
        chosen = given[:, :fed].reshape(len(own), -1).long()
        chosen = torch.where((chosen >= 0).all(-1, keepdim=True), chosen, own)
        gates = torch.softmax(logits, -1, dtype=torch.float).gather(-1, chosen)
        if router.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        return logits, gates.to(logits.dtype), chosen

    return hook


def _check(given: Tensor, layers: Sequence[Qwen3MoeTopKRouter]) -> None:
    if not layers:
        raise ConfigError("routes can be replayed in a Qwen3-MoE only: set algorithm.routing.replay=none")
    router = layers[0]
    expected = (len(layers), router.top_k)
    if given.dim() != 4 or given.shape[2:] != expected:
        raise ConfigError(
            f"routes of shape {tuple(given.shape)} for a model whose [layers, top_k] are {list(expected)}: "
            "sample and train the same model"
        )
    if given.numel() and int(given.max()) >= router.num_experts:
        raise ConfigError(f"a route leads to expert {int(given.max())} of {router.num_experts} (they count from 0)")


class RouteLog:
    """The routes of a whole batch, put together from those of its micro-batches."""

    def __init__(self, lengths: Tensor, width: int) -> None:
        """Begin with nothing.

        Args:
            lengths: of the rows, int64 `[B]`.
            width: of the batch, `T`.
        """
        self.lengths, self.width = lengths, width
        self.own: Tensor | None = None
        """int16 `[B, T, layers, top_k]`; -1 for padding and for what was not fed. None for a dense model."""
        self._probabilities: Tensor | None = None

    def add(self, rows: Sequence[int], routes: Routes) -> None:
        """Take in a forward pass over some rows."""
        if not routes.own:
            return
        own = torch.stack(routes.own, 1)
        own = own.view(len(rows), -1, *own.shape[1:])
        if self.own is None:
            self.own = torch.full((len(self.lengths), self.width, *own.shape[2:]), -1, dtype=torch.int16)
        index, fed = torch.as_tensor(rows), own.shape[1]
        real = torch.arange(fed) < self.lengths[index, None]
        self.own[index, :fed] = torch.where(real[..., None, None], own, -1).to(torch.int16)
        logits = torch.stack([x.detach() for x in routes.logits])[:, real.flatten()]
        summed = torch.softmax(logits.double(), -1).sum(1)
        self._probabilities = summed if self._probabilities is None else self._probabilities + summed

    def metrics(self) -> dict[str, float]:
        """Say how evenly the experts are used; nothing for a dense model.

        `routing/entropy` is that of the mean router distribution, as a share of log(experts), averaged over layers:
        near 0 the router has collapsed. `routing/busiest_expert` is the share of the picks of the most used expert of
        any layer, times the number of experts: 1 is balance, experts / top_k the most there can be.
        """
        if self._probabilities is None or self.own is None:
            return {}
        experts = self._probabilities.shape[-1]
        mean = self._probabilities / self._probabilities.sum(-1, keepdim=True)
        entropy = torch.special.entr(mean).sum(-1) / math.log(experts)
        picks = self.own.flatten(0, 1).transpose(0, 1).flatten(1)
        counts = torch.stack([torch.bincount(layer[layer >= 0].long(), minlength=experts) for layer in picks])
        load = counts.double() / counts.sum(-1, keepdim=True) * experts
        return {"routing/entropy": float(entropy.mean()), "routing/busiest_expert": float(load.max())}


def balance_loss(routes: Routes, real: Tensor, top_k: int) -> Tensor:
    """Return the load-balancing loss of the Switch Transformer (Fedus et al. 2021, eq. 4-6), without its coefficient.

    By layer, `experts * sum_i f_i P_i`, where `f_i` is the share of picks that went to expert i and `P_i` its mean
    probability; then the mean over layers. It is 1 in balance and grows up to experts / top_k. Layers are not pooled
    as in transformers' models: there, one layer's favourite can make up for another's.

    Args:
        routes: of a forward pass.
        real: bool `[B, fed]`: the positions that are no padding.
        top_k: experts per token.
    """
    losses = [load_balancing_loss_func((logits,), logits.shape[-1], top_k, real) for logits in routes.logits]
    return torch.stack([torch.as_tensor(loss) for loss in losses]).mean() / top_k
