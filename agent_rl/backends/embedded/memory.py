"""Memory: what a run takes at its peak, estimated before it begins, without reading a weight.

The model is built on torch's `meta` device, where tensors have shapes and no data. Activations are traced there, the
rest follows from shapes. BENCHMARKS.md ("Memory") has estimates beside measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agent_rl.algorithms import Algorithm
from agent_rl.backends.embedded.activations import activations
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.fine_tuning import freeze_parameters, new_adapter
from agent_rl.backends.embedded.free_memory import free_memory
from agent_rl.backends.embedded.fresh import SHORTEST_CONTEXT
from agent_rl.backends.embedded.model import make_model
from agent_rl.config import check_config
from agent_rl.engines.embedded.device import device_of
from agent_rl.engines.embedded.engine import KEPT
from agent_rl.engines.embedded.forward import head_dim_of, is_fusible
from agent_rl.engines.embedded.graphs import GATHERED, ROWS, records_steps
from agent_rl.engines.embedded.model_folder import unloadable
from agent_rl.engines.embedded.pages import PAGE
from agent_rl.engines.embedded.parts import head_of
from agent_rl.engines.model_files import base_model, load_options
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import EnvSpec

GIB = 2**30
STATE = {"adamw": 8, "adamw_8bit": 2, "paged_adamw": 0, "paged_adamw_8bit": 0}
"""Bytes of state for a trained parameter; a paged optimizer's may go to the machine's memory."""
HEAD_COPIES = 3
"""Of the logits that exist at a time: their log-softmax, its exponential and the gradient."""
PROCESS = 0.3 * GIB
"""Of a further process before it has a model: Python, torch and transformers. Measured."""
PROGRAM = 0.12 * GIB
"""Of this process besides: modules that are imported later, a tokenizer, episodes. Measured with the default model."""
FREED = 0.4
"""Of activations and gradients, on a CPU: memory that glibc keeps when they are freed, in pieces that don't fit what
comes next. Measured by benchmarks/memory.py."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they are for."""

    parts: Mapping[str, float]
    """At the peak: when a gradient is computed, or when tokens are sampled, whichever takes more."""
    free: float | None
    """What the device has left; None if it doesn't say."""

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """Say it in a line."""
        of = "" if self.free is None else f" of {self.free / GIB:.1f}"
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size >= 0.05 * GIB)
        return f"memory: about {self.total / GIB:.1f} GiB{of} free" + (f": {said}" if said else "")


def require_memory(config: TrainConfig, env: EnvSpec, source: str | Path | None = None) -> Memory:
    """Return what a run will take; `source` is the checkpoint that it goes on from, if it is resumed.

    Raises:
        ConfigError: if that is more than there is, with the settings that take less; not with `check_memory=false`.
    """
    found = estimate(config, env, source)
    if not config.check_memory or found.free is None or found.total <= found.free:
        return found
    savings = sorted(_savings(config, env, source, found), reverse=True)
    ways = ", ".join(f"{setting} ({size / GIB:.1f})" for size, setting in savings if size > 0.02 * found.total)
    raise ConfigError(
        f"{found} on {device_of(config.device)}, which is not enough\n"
        f"what would take less, by so many GiB: {ways or 'a smaller model'}\n"
        "or check_memory=false, if you know better"
    )


def estimate(config: TrainConfig, env: EnvSpec, source: str | Path | None = None) -> Memory:
    """Return what a run will take beyond what this process has now."""
    model, device = _shape(config, source or config.start_from), device_of(config.device)
    known = source or config.start_from or config.rollout.context or env.budget.tokens
    context = config.context(env.budget.tokens) if known else SHORTEST_CONTEXT
    held = _held(model, config)
    sampling = _sampling(model, config, context, device)
    updating = {"pages": min(sampling["pages"], KEPT)} | _updating(model, config, context, device)  # last: it spoils it
    parts = held | max(updating, sampling, key=lambda phase: sum(phase.values()))
    if config.processes > 1 and device.type == "cpu":
        each = sum(parts.values()) - held["optimizer"] - held["reference"] + PROCESS
        parts["other processes"] = (config.processes - 1) * each
    return Memory(parts, free_memory(device))


def _held(model: PreTrainedModel, config: TrainConfig) -> dict[str, float]:
    """Return the bytes that are there in all phases."""
    trained, own = _trained(model), _own(model)
    algorithm, state = Algorithm(config.algorithm), STATE[config.optimizer.kind]
    held = {
        "program": PROGRAM,
        "weights": _nbytes(model.parameters()),
        "rounded weights": _nbytes(own) if config.rollout.weights != "float32" else 0.0,
        "reference": _nbytes(own) if algorithm.needs_reference and config.lora is None else 0.0,
        "optimizer": state * _count(trained) + 4.0 * _count(p for p in trained if p.dtype != torch.float32),
    }
    if config.algorithm.critic.where == "separate":
        held["critic"] = _nbytes(own) + 8.0 * _count(own)
    return held


def _sampling(model: PreTrainedModel, config: TrainConfig, context: int, device: torch.device) -> dict[str, float]:
    """Return the bytes that the engine takes while it samples; vLLM's are another process's."""
    if config.engine != "torch":
        return {"pages": 0.0, "engine": 0.0}
    taken = {"pages": _pages(model, config.rollout.slots, context), "engine": _engine_copy(model, _nbytes(_own(model)))}
    if records_steps(model, device):
        layer = _pages(model, ROWS[-1], context) / model.config.num_hidden_layers  # of a fused one, they are alike
        taken["recorded steps"] = min(GATHERED, layer) + 4.0 * sum(ROWS) * len(head_of(model).weight)
    return taken


def _updating(model: PreTrainedModel, config: TrainConfig, context: int, device: torch.device) -> dict[str, float]:
    """Return the bytes that a gradient takes while it is computed."""
    gradients, head = 4.0 * _count(_trained(model)), head_of(model).weight
    if config.algorithm.critic.where == "separate":
        gradients += 4.0 * _count(_own(model))
    n = min(config.forward_tokens, config.precision.tokens_at_a_time(len(head)))
    logits = HEAD_COPIES * 4.0 * n * len(head) + (0 if head.dtype == torch.float32 else 4.0 * head.numel())
    taken = {"gradients": gradients, "activations": logits + activations(model, config, context)}
    if device.type == "cpu":
        taken["freed but kept"] = FREED * sum(taken.values())
    return taken


def _shape(config: TrainConfig, source: str | Path | None) -> PreTrainedModel:
    """Return the model that is trained, without data, frozen and with adapters as it will be."""
    dtype = getattr(torch, config.dtype)
    with torch.device("meta"):
        if source is None:
            model = make_model(config.model, config.vocab_size, config.seed).to(dtype)
        else:
            try:
                found = AutoConfig.from_pretrained(**load_options(base_model(source) or source))
                model = AutoModelForCausalLM.from_config(found, dtype=dtype)
            except Exception as error:  # of its many readers and families
                raise unloadable(source, error) from error
    model.eval()
    if config.lora is not None:
        new_adapter(model, config.lora, config.freeze, config.seed)
    freeze_parameters(model, config.freeze)
    return model


def _engine_copy(model: PreTrainedModel, weights: float) -> float:
    """Return the bytes of the engine's own weights, which it gives back for an update.

    All of them where its forward is fused, and a wide head.
    """
    head, tied = head_of(model).weight, head_of(model).weight is model.get_input_embeddings().weight
    wide = 4.0 * head.numel()
    if is_fusible(model.config):
        return weights - (0 if tied else head.nbytes) + wide
    return 0 if head.dtype == torch.float32 else wide


def _pages(model: PreTrainedModel, slots: int, context: int) -> float:
    """Return the bytes of keys and values when every slot is full; a recurrent model has none."""
    text = model.config.get_text_config(decoder=True)
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers
    heads = [getattr(one, "num_key_value_heads", None) or getattr(one, "num_attention_heads", 0) for one in layers]
    width = sum(n * head_dim_of(one) for n, one in zip(heads, layers, strict=True) if n)
    return float(slots * -(-context // PAGE) * PAGE * 2 * width * model.dtype.itemsize)


def _savings(config: TrainConfig, env: EnvSpec, source: str | Path | None, now: Memory) -> Iterator[tuple[float, str]]:
    """Yield what other settings would save, in bytes, with the settings."""
    shape = _shape(config, source or config.start_from)
    layers = shape.config.get_text_config(decoder=True).num_hidden_layers
    changes: dict[str, object] = {
        "micro_batch_tokens": max(128, config.forward_tokens // 4),
        "gradient_checkpointing": True,
        "lora.rank": 16,
        "optimizer.kind": "adamw_8bit",
        "freeze.layers": max(config.freeze.layers, layers // 2),
        "rollout.slots": max(1, config.rollout.slots // 4),
        "dtype": "bfloat16",
        "processes": 1,
    }
    for name, value in changes.items():
        settings = config.model_dump(mode="json", by_alias=True)
        section, _, key = name.rpartition(".")
        inner = settings if not section else settings.setdefault(section, {})
        if inner is None:
            inner = settings[section] = {}
        inner[key] = value
        try:
            other = estimate(check_config(TrainConfig, settings), env, source)
        except ConfigError:  # of settings that don't go together
            continue
        yield now.total - other.total, f"{name}={str(value).lower()}"


def _trained(model: PreTrainedModel) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _own(model: PreTrainedModel) -> list[Tensor]:
    """Return the weights without those of adapters."""
    return [p for name, p in model.named_parameters() if ".lora_" not in name]


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def _nbytes(parameters: Iterable[Tensor]) -> float:
    return float(sum(p.nbytes for p in parameters))
