"""Replay: the routes of a mixture of experts in a training forward, taken as given, and recorded.

A router picks `top_k` experts for every input position. Rollout and training differ in their last bits, or in the
weights themselves, and where two experts are nearly equal they pick others: the token then runs through other weights.
Replaying the rollout's picks in training takes that part of the gap away (Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from agent_rl.errors import ConfigError


@dataclass(slots=True)
class Routes:
    """What the routers of a forward pass said; empty until it ran, and for a dense model."""

    logits: list[Tensor] = field(default_factory=list)
    """`[N, experts]` by layer, with gradient; `N` are the input positions, row by row."""
    own: list[Tensor] = field(default_factory=list)
    """int64 `[N, top_k]` by layer: what each router picked by itself, also where another route was replayed."""


def routers(model: nn.Module) -> list[Qwen3MoeTopKRouter]:
    """Return a model's routers by layer; none for a dense model, or one whose gates are computed in another way."""
    return [m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)]


@contextmanager
def routed(model: nn.Module, given: Tensor | None = None) -> Iterator[Routes]:
    """Let the forward pass inside take given routes, if there are any, and record what its routers said."""
    with recorded(model) as routes, ExitStack() as replay:
        if given is not None:
            replay.enter_context(replayed(model, given))
        yield routes


@contextmanager
def recorded(model: nn.Module) -> Iterator[Routes]:
    """Record what the routers of one forward pass say; enter `replayed` inside."""
    routes = Routes()

    def record(router: nn.Module, inputs: tuple[Tensor, ...], output: _RouterOutput) -> None:
        routes.logits.append(output[0])
        routes.own.append(output[2])

    with _hooked([(router, record) for router in routers(model)]):
        yield routes


@contextmanager
def replayed(model: nn.Module, given: Tensor) -> Iterator[None]:
    """Let the forward passes inside take given routes; gradient checkpointing repeats one during the backward.

    Only which experts are taken is given. Their weights come from the present router, as they would without: softmax
    over all experts, gathered at the given ones, normalised if the model does so. So the router keeps its gradient.

    Routes are integers `[B, T, layers, top_k]` by input position: the route of position t is that of the input token t.
    `T` may exceed what is fed, since the last token is never fed. A position with a -1 routes for itself. The model is
    a Qwen3-MoE, sharded by FSDP or not.

    Raises:
        ConfigError: if the routes don't fit the model or what it is fed, or it has no routers to give them to.
    """
    layers = routers(model)
    _check(given, layers)
    given = given.to(layers[0].weight.device)
    with _hooked([(router, _replay(given[:, :, index])) for index, router in enumerate(layers)]):
        yield


_RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits, gates and picks, `[N, experts]`, `[N, top_k]` and `[N, top_k]`."""
_Hook = Callable[[nn.Module, tuple[Tensor, ...], _RouterOutput], _RouterOutput | None]


@contextmanager
def _hooked(hooks: Sequence[tuple[nn.Module, _Hook]]) -> Iterator[None]:
    with ExitStack() as stack:
        for router, hook in hooks:
            stack.callback(router.register_forward_hook(hook).remove)
        yield


def _replay(given: Tensor) -> _Hook:
    def replay(router: nn.Module, inputs: tuple[Tensor, ...], output: _RouterOutput) -> _RouterOutput:
        logits, _, own = output
        rows, fed = len(given), len(own) // len(given)
        if rows * fed != len(own) or fed > given.shape[1]:
            raise ConfigError(f"routes of {tuple(given.shape[:2])} positions for {len(own)} that are fed")
        chosen = given[:, :fed].reshape(len(own), -1).long()
        chosen = torch.where((chosen >= 0).all(-1, keepdim=True), chosen, own)
        gates = torch.softmax(logits, -1, dtype=torch.float).gather(-1, chosen)
        if router.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        return logits, gates.to(logits.dtype), chosen

    return replay


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
