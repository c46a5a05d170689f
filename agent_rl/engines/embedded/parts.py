"""Parts: where a causal LM of transformers keeps its body, its head, and what it does to the head's logits.

The families differ in names (`model.layers`, `transformer.h`, `gpt_neox`), in what lies between body and head, and in
what follows it: Gemma 2 caps its logits, Cohere and Granite scale them. Here alone is that known; peft's wrapper is
seen through everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from agent_rl.errors import ConfigError

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""What configs call a number that logits are multiplied by."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What they call the magnitude that logits approach at most."""
USUAL_CONTEXT = 1024
"""Tokens, of a model that knows so many positions."""


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return transformers' model itself, of a model that peft may have wrapped; adapters stay in its layers."""
    return cast(PreTrainedModel, model.get_base_model() if hasattr(model, "get_base_model") else model)  # type: ignore[operator]


def body_of(model: nn.Module) -> PreTrainedModel:
    """Return the model without its head; its output has `last_hidden_state`, `[B, T, hidden]`."""
    return cast(PreTrainedModel, unwrapped(model).base_model)


@dataclass(frozen=True, slots=True)
class Head:
    """The linear map to logits, and what the model does to them afterwards: `cap * tanh(scale * logits / cap)`."""

    weight: Tensor
    """`[vocabulary, hidden]`; it may have more rows than the tokenizer has tokens."""
    bias: Tensor | None
    scale: float = 1.0
    cap: float | None = None
    """None caps nothing."""

    def logits(self, states: Tensor) -> Tensor:
        """Return the model's logits of states `[..., hidden]`."""
        return self.shaped(linear(states.to(self.weight.dtype), self.weight, self.bias))

    def widened(self) -> Head:
        """Return it in float32 at least, without gradient; a copy if its weights are narrower."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return replace(self, weight=self.weight.detach().to(dtype), bias=bias)

    def shaped(self, logits: Tensor) -> Tensor:
        """Scale and cap what the linear map returned; in place."""
        if self.scale != 1:
            logits = logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


def head_of(model: nn.Module) -> Head:
    """Return a model's head; its weights are the parameters themselves.

    Raises:
        ConfigError: if it has no linear head.
    """
    module = _head_module(unwrapped(model))
    config = unwrapped(model).config.get_text_config()
    scale = 1.0
    for name in MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    if (
        scaling := getattr(config, "logits_scaling", None)
    ) is not None and config.model_type != "minicpm3":  # before it
        scale = scale * scaling if config.model_type == "hyperclovax" else scale / scaling
    weight, bias = cast(Tensor, module.weight), cast(Tensor | None, getattr(module, "bias", None))
    return Head(weight, bias, scale, next((cap for name in CAPS if (cap := getattr(config, name, None))), None))


def states_of(model: nn.Module, token_ids: Tensor, **inputs: object) -> Tensor:
    """Return what the head reads, `[B, T, hidden]`, of token ids `[B, T]`; no logits are computed.

    `inputs` are further arguments of the model's forward, of which it gets those that it knows.

    Raises:
        ConfigError: if the model has no linear head, or does not call it.
    """
    inner = unwrapped(model)
    known = inspect.signature(inner.forward).parameters
    inputs["use_cache"] = False
    for name in inputs.keys() - known.keys():
        del inputs[name]
    head = _head_module(inner)
    found: list[Tensor] = []

    def capture(states: Tensor) -> Tensor:
        found.append(states)
        return states[..., :1]

    head.forward = capture
    try:
        inner(input_ids=token_ids, **inputs)
    finally:
        del head.forward  # the instance's, which hid the class's
    if len(found) != 1:
        raise ConfigError(f"{inner.config.model_type} calls its head {len(found)} times a forward pass, not once")
    return found[0]


def _head_module(model: PreTrainedModel) -> nn.Module:
    module = model.get_output_embeddings()
    if not isinstance(getattr(module, "weight", None), Tensor):
        raise ConfigError(
            f"{model.config.model_type} has no linear output head, which sampling and training need: start from a "
            "causal language model"
        )
    return cast(nn.Module, module)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return a model's decoder layers, the one that is fed first at the front.

    Raises:
        ConfigError: if they are in no list of as many modules as the configuration says.
    """
    config = unwrapped(model).config.get_text_config(decoder=True)
    lists = (module for module in body_of(model).modules() if isinstance(module, nn.ModuleList))
    found = next((found for found in lists if len(found) == config.num_hidden_layers), None)
    if found is None:
        raise ConfigError(f"the layers of {config.model_type} can't be told apart: leave out freeze.layers")
    return found


def rows_of(model: nn.Module) -> int:
    """Return how many token ids a model can be fed, which may be more than its tokenizer has."""
    return int(cast(Tensor, unwrapped(model).get_input_embeddings().weight).shape[0])


def usual_context(model: nn.Module) -> int:
    """Return the longest sequence, in tokens, where neither settings nor an environment's budget say it."""
    return min(USUAL_CONTEXT, positions_of(model) or USUAL_CONTEXT)


def positions_of(model: nn.Module) -> int | None:
    """Return the longest sequence that a model can be fed, in tokens; None if it knows no limit.

    Beyond the positions that LongRoPE began with (Phi-3), a model rotates every position in another way: that of a
    whole batch by the longest sequence in it, and keys of earlier turns differ from those that are computed again.
    """
    config = unwrapped(model).config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    known = next((n for name in names if isinstance(n := getattr(config, name, None), int) and n > 0), None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    short = (kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope")
    return min((n for n in (known, *short) if n is not None), default=None)
