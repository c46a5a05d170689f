"""Replay: the routes of a mixture of experts in a training forward, taken as given, and recorded.

A router picks `top_k` experts for every input position. Rollout and training differ in their last bits, or in the
weights themselves, and where two experts are nearly equal they pick others: the token then runs through other weights.
Replaying the rollout's picks in training takes that part of the gap away (Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agent_rl.errors import ConfigError


@dataclass(slots=True)
class Routes:
    """What the routers of a forward pass said; empty until it ran, and for a dense model."""

    logits: list[Tensor] = field(default_factory=list)
    """`[N, experts]` by layer, with gradient; `N` are the input positions, row by row."""
    own: list[Tensor] = field(default_factory=list)
    """int64 `[N, top_k]` by layer: what each router picked by itself, also where another route was replayed."""


ROUTERS = ("topkrouter", "tokenchoicerouter")
"""How transformers' families call the module that returns logits, gates and picks, in small letters."""


def routers(model: nn.Module) -> list[nn.Module]:
    """Return a model's routers by layer; none for a dense model, or one whose experts are chosen in another way."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith(ROUTERS)]


def experts_of(model: nn.Module) -> int:
    """Return how many experts the routers of a model choose from; 0 without routers."""
    return max((cast(int, router.num_experts) for router in routers(model)), default=0)


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

    def record(router: nn.Module, inputs: _Inputs, others: dict[str, object], output: _RouterOutput) -> None:
        routes.logits.append(output[0])
        routes.own.append(output[2])

    with _hooked([(router, record) for router in routers(model)]):
        yield routes


@contextmanager
def replayed(model: nn.Module, given: Tensor) -> Iterator[None]:
    """Let the forward passes inside take given routes; gradient checkpointing repeats one during the backward.

    Only which experts are taken is given. Their weights come from the present router's own code, which runs again with
    the given experts in the place of those that its top-k found. So the router keeps its gradient.

    Routes are integers `[B, T, layers, top_k]` by input position: the route of position t is that of the input token t.
    `T` may exceed what is fed, since the last token is never fed. A position with a -1 routes for itself.

    Raises:
        ConfigError: if the routes don't fit the model or what it is fed, or it has no routers to give them to.
    """
    layers = routers(model)
    _check(given, layers)
    given = given.to(next(layers[0].parameters()).device)
    with _hooked([(router, _replay(given[:, :, index])) for index, router in enumerate(layers)]):
        yield


_Inputs = tuple[Tensor, ...]
_RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits, gates and picks, `[N, experts]`, `[N, top_k]` and `[N, top_k]`."""
_Hook = Callable[[nn.Module, _Inputs, dict[str, object], _RouterOutput], _RouterOutput | None]


@contextmanager
def _hooked(hooks: Sequence[tuple[nn.Module, _Hook]]) -> Iterator[None]:
    with ExitStack() as stack:
        for router, hook in hooks:
            stack.callback(router.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _replay(given: Tensor) -> _Hook:
    def replay(router: nn.Module, inputs: _Inputs, others: dict[str, object], output: _RouterOutput) -> _RouterOutput:
        own = output[2]
        rows, fed = len(given), len(own) // len(given)
        if rows * fed != len(own) or fed > given.shape[1]:
            raise ConfigError(f"routes of {tuple(given.shape[:2])} positions for {len(own)} that are fed")
        chosen = given[:, :fed].reshape(len(own), -1).long()
        chosen = torch.where((chosen >= 0).all(-1, keepdim=True), chosen, own)
        with _Instead(own, chosen) as instead:
            again = router.forward(*inputs, **others)
        if not instead.met:
            raise ConfigError(
                f"{type(router).__name__} doesn't take its experts from a top-k, so none can be given to it: set "
                "algorithm.routing.replay=none"
            )
        return (output[0], *again[1:])

    return replay


class _Instead(TorchFunctionMode):
    """Inside, a top-k that finds `own` returns `chosen`, and the values there."""

    def __init__(self, own: Tensor, chosen: Tensor) -> None:
        super().__init__()
        self.own, self.chosen, self.met = own, chosen, False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Tensor, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        found = cast(torch.return_types.topk, result)
        if found.indices.shape != self.own.shape or not torch.equal(found.indices, self.own):
            return result
        self.met = True
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


def _check(given: Tensor, layers: Sequence[nn.Module]) -> None:
    if not layers:
        raise ConfigError("the model has no router to give routes to: set algorithm.routing.replay=none")
    experts, expected = cast(int, layers[0].num_experts), (len(layers), layers[0].top_k)
    if given.dim() != 4 or given.shape[2:] != expected:
        raise ConfigError(
            f"routes of shape {tuple(given.shape)} for a model whose [layers, top_k] are {list(expected)}: "
            "sample and train the same model"
        )
    if given.numel() and int(given.max()) >= experts:
        raise ConfigError(f"a route leads to expert {int(given.max())} of {experts} (they count from 0)")
