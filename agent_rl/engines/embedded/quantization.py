"""Weight formats: what a rollout with low-precision weights does to them, simulated by rounding.

An inference server often holds a model in bfloat16, float8 or int4 while the trainer holds float32. Here the engine's
copy of the weights is rounded to such a format and back at every `refresh`; the trainer's stay as they are. Only the
weights are rounded: activations, keys and values stay float32, as do the kernels, so that nothing gets faster and the
gap between rollout and training comes from the weights alone.

float8 and int4 hold the projections of attention, MLPs and experts. Embeddings, head, norms and routers are rounded to
bfloat16 in those formats, too: servers leave them out of quantisation (llm-compressor's recipes for Qwen3-MoE ignore
`lm_head` and `mlp.gate`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agent_rl.engines.base import WeightFormat
from agent_rl.engines.embedded.adapters import merge, merged_parameters
from agent_rl.engines.embedded.forward import Forward, StepOutput
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.layout import Layout
from agent_rl.engines.embedded.module_forward import make_forward
from agent_rl.errors import ConfigError

GROUP = 128
"""Neighbouring inputs of one output that share an int4 scale: the usual group of GPTQ and AWQ."""
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")
"""What float8 and int4 hold, by a part of the parameter's name; biases are rounded to bfloat16."""
ROUTERS = ("router", "gate")
"""Linear modules that they leave out, by the end of the name."""


def to_bfloat16(weight: Tensor) -> Tensor:
    """Round to the nearest bfloat16, ties to even."""
    return weight.bfloat16().to(weight.dtype)


def to_float8(weight: Tensor) -> Tensor:
    """Round `[..., outputs, inputs]` to float8 e4m3, one scale an output: its largest magnitude becomes 448."""
    scale = _scale(weight, FLOAT8_MAX)
    return (weight / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def to_int4(weight: Tensor) -> Tensor:
    """Round `[..., outputs, inputs]` to the integers -7 … 7, one scale a group of 128 inputs (symmetric, W4A16).

    Rows that groups of 128 don't divide share one scale over all of their inputs.
    """
    inputs = weight.shape[-1]
    grouped = weight.reshape(*weight.shape[:-1], -1, GROUP if inputs % GROUP == 0 else inputs)
    scale = _scale(grouped, 7.0)
    return ((grouped / scale).round().clamp(-7, 7) * scale).view_as(weight)


_PROJECTION = {"bfloat16": to_bfloat16, "float8": to_float8, "int4": to_int4}


@torch.no_grad()
def round_weights(source: PreTrainedModel, target: PreTrainedModel, weights: WeightFormat) -> None:
    """Write the weights of `source`, its adapters merged and rounded, into `target`, a model without any."""
    kept = dict(merged_parameters(source))
    for name, parameter in target.named_parameters():
        is_held = any(part in name for part in PROJECTIONS) and not name.endswith("bias")
        rounding = _PROJECTION[weights] if is_held else to_bfloat16
        parameter.copy_(rounding(kept[name]))


def require_known_projections(model: PreTrainedModel, weights: WeightFormat) -> None:
    """Refuse a model, without adapters, of which a format would hold nothing, or only a part.

    Raises:
        ConfigError: if it calls a linear module by a name that is not known here.
    """
    head = model.get_output_embeddings()
    linear = (name for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head)
    others = {name.rpartition(".")[2] for name in linear if not any(part in name for part in PROJECTIONS)}
    if unknown := sorted(name for name in others if not name.endswith(ROUTERS)):
        raise ConfigError(
            f"rollout.weights={weights} rounds what is called {', '.join(PROJECTIONS)}, and {model.config.model_type} "
            f"computes with {', '.join(unknown)}, too: set rollout.weights=bfloat16"
        )


class QuantizedForward:
    """A forward over a rounded copy of the model; every `refresh` rounds again."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, weights: WeightFormat) -> None:
        self.model, self.weights = model, weights
        self.rounded = merge(copy.deepcopy(model))
        if weights != "bfloat16":
            require_known_projections(self.rounded, weights)
        round_weights(model, self.rounded, weights)
        self.inner = make_forward(self.rounded, cache)

    def refresh(self) -> None:
        """Round the model's present weights."""
        round_weights(self.model, self.rounded, self.weights)
        self.inner.refresh()

    def release(self) -> None:
        """Give back what the inner forward made of the rounded model, which stays."""
        self.inner.release()

    def __call__(self, layout: Layout) -> StepOutput:
        """Feed `layout` and return the next-token logits."""
        return self.inner(layout)


def forward_in(weights: WeightFormat) -> Callable[[PreTrainedModel, KVCache], Forward]:
    """Return what makes an engine's forward with weights of this format; float32 are the model's own.

    Raises:
        ConfigError: if there is no such format.
    """
    if weights not in get_args(WeightFormat):
        raise ConfigError(f"no weight format '{weights}': there are {', '.join(get_args(WeightFormat))}")
    if weights == "float32":
        return make_forward
    return lambda model, cache: QuantizedForward(model, cache, weights)


def _scale(weight: Tensor, largest: float) -> Tensor:
    """What the largest magnitude along the last dimension has to be divided by to become `largest`."""
    magnitude = weight.abs().amax(-1, keepdim=True)
    return torch.where(magnitude == 0, 1.0, magnitude / largest)
