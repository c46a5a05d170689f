"""What a micro-batch's layers hold between its forward and its backward, without computing anything.

The model is on torch's `meta` device, where tensors have shapes and no data, and a micro-batch goes forward and back
there. Whatever the family, the adapters and the frozen parts, what is alive at a time is added up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.fine_tuning import checkpointed
from agent_rl.engines.embedded.parts import states_of
from agent_rl.errors import AgentRLError

SMALL = 0.1 * 2**30
"""Activations that are not worth the tenth of a second in which they are traced."""
UNTRACED = 32
"""Activations of a token in a layer, in hidden sizes, where a model can't run on `meta`; Qwen3's kind has 30."""


def activations(model: PreTrainedModel, config: TrainConfig, context: int) -> float:
    """Return the most bytes that the layers hold between the forward and the backward of a micro-batch.

    The model is spoilt by it: under autocast it gets another format.
    """
    tokens, width = config.forward_tokens, min(config.forward_tokens, context)
    text = model.config.get_text_config(decoder=True)
    layers, size = text.num_hidden_layers - config.freeze.layers, text.hidden_size
    rough = float(UNTRACED * layers * tokens * size * model.dtype.itemsize)
    if rough < SMALL:
        return rough
    casts = 0.0
    if config.precision.autocast != "none":
        model.to(getattr(torch, config.precision.autocast))
        casts = float(sum(p.nbytes for p in model.parameters()))
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.grad = torch.empty_like(parameter)  # `estimate` counts it; a narrow weight's comes and goes
    model.config._attn_implementation = SHAPES_ONLY
    sparing = checkpointed(model) if config.gradient_checkpointing else nullcontext()
    ids = torch.zeros(-(-tokens // width), width, dtype=torch.int64, device="meta")
    try:
        with Alive([*model.parameters(), *model.buffers()]) as alive:
            with sparing:
                states = states_of(model, ids)
            states.backward(torch.empty_like(states))  # type: ignore[no-untyped-call]
        return float(alive.most) + casts
    except AgentRLError:
        raise
    except Exception:  # of a family's code that looks at data, as routers do
        return rough


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the memory of what is computed inside and still alive."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        known += [p.grad for p in known if p.grad is not None]
        self._known = {id(storage): storage for p in known for storage in [p.untyped_storage()]}
        self._found: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self._add(made.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known or key in self._found:
            return

        def gone(_: object) -> None:
            del self._found[key]
            self.now -= size

        self._found[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


class _Attention(torch.autograd.Function):
    """What is kept of attention in one kernel: queries, keys, values and the result."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **_: object
) -> tuple[Tensor, None]:
    out: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


SHAPES_ONLY = "agent_rl_memory"
"""An attention for `meta`: it keeps what a kernel would, and computes nothing."""
AttentionInterface.register(SHAPES_ONLY, _attend)
