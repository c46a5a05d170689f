"""Routing: how evenly the experts of a mixture are used in training, and the loss that keeps them in balance."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agent_rl.grid import Grid
from agent_rl.moe.routes import Routes


class RouteLog:
    """The routes of a whole batch, put together from those of its micro-batches."""

    def __init__(self, tokens: int) -> None:
        """Begin with nothing, for a batch of so many tokens."""
        self.tokens = tokens
        self.own: Tensor | None = None
        """int16 `[N, layers, top_k]`; -1 for what was not fed. None for a dense model."""
        self._probabilities: Tensor | None = None

    def add(self, grid: Grid, routes: Routes) -> None:
        """Take in a forward pass over some rows, which are laid out in a grid."""
        if not routes.own:
            return
        own = torch.stack(routes.own, 1).cpu()
        own = own.view(len(grid.inside), -1, *own.shape[1:])
        if self.own is None:
            self.own = torch.full((self.tokens, *own.shape[2:]), -1, dtype=torch.int16)
        fed = own.shape[1]
        real = grid.inside[:, :fed]
        Grid(grid.places[:, :fed], real).put(own, self.own)
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
        picks = self.own.transpose(0, 1).flatten(1)
        counts = torch.stack([torch.bincount(layer[layer >= 0].long(), minlength=experts) for layer in picks])
        load = counts.double() / counts.sum(-1, keepdim=True) * experts
        return {"routing/entropy": float(entropy.mean()), "routing/busiest_expert": float(load.max())}


def balance_loss(routes: Routes, real: Tensor, top_k: int) -> Tensor:
    """Return the load-balancing loss of the Switch Transformer (Fedus et al. 2021, eq. 4-6), without its coefficient.

    By layer, `experts * sum_i f_i P_i`, where `f_i` is the share of picks that went to expert i and `P_i` its mean
    probability, over the positions that are no padding (`real`, bool `[B, fed]`); then the mean over layers. It is 1 in
    balance and grows up to experts / top_k. Layers are not pooled as in transformers' models: there, one layer's
    favourite can make up for another's.
    """
    losses = [load_balancing_loss_func((logits,), logits.shape[-1], top_k, real) for logits in routes.logits]
    return torch.stack([torch.as_tensor(loss) for loss in losses]).mean() / top_k
