"""Memory: what a run takes at its peak, estimated before it begins, without reading a weight.

The model is built on torch's `meta` device, where tensors have shapes and no data, and a micro-batch goes forward and
backward there: whatever the family, the adapters and the frozen parts, what is alive at a time is added up. The rest
follows from shapes. BENCHMARKS.md ("Memory") has estimates beside measured peaks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agent_rl.algorithms import Algorithm
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.fine_tuning import checkpointed, freeze_parameters, new_adapter
from agent_rl.backends.embedded.fresh import SHORTEST_CONTEXT
from agent_rl.backends.embedded.model import make_model
from agent_rl.config import check_config
from agent_rl.engines.embedded.device import device_of
from agent_rl.engines.embedded.engine import KEPT
from agent_rl.engines.embedded.forward import head_dim_of, is_fusible
from agent_rl.engines.embedded.graphs import GATHERED, ROWS, records_steps
from agent_rl.engines.embedded.model_folder import unloadable
from agent_rl.engines.embedded.pages import PAGE
from agent_rl.engines.embedded.parts import head_of, states_of
from agent_rl.engines.model_files import base_model, load_options
from agent_rl.errors import AgentRLError, ConfigError
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
SMALL = 0.1 * GIB
"""Activations that are not worth the tenth of a second in which they are traced."""
UNTRACED = 32
"""Activations of a token in a layer, in hidden sizes, where a model can't run on `meta`; Qwen3's kind has 30."""


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
    trained = [p for p in model.parameters() if p.requires_grad]
    own = [p for name, p in model.named_parameters() if ".lora_" not in name]
    weights, head = _nbytes([*model.parameters()]), head_of(model).weight
    narrow = [p for p in trained if p.dtype != torch.float32]
    algorithm, state = Algorithm(config.algorithm), STATE[config.optimizer.kind]
    known = source or config.start_from or config.rollout.context or env.budget.tokens
    context = config.context(env.budget.tokens) if known else SHORTEST_CONTEXT
    pages = _pages(model, config.rollout.slots, context) if config.engine == "torch" else 0.0
    fixed = {
        "program": PROGRAM,
        "weights": weights,
        "rounded weights": _nbytes(own) if config.rollout.weights != "float32" else 0.0,
        "reference": _nbytes(own) if algorithm.needs_reference and config.lora is None else 0.0,
        "optimizer": state * _count(trained) + 4 * _count(narrow),
    }
    gradients = 4.0 * _count(trained)
    if config.algorithm.critic.where == "separate":
        fixed["critic"], gradients = _nbytes(own) + 8.0 * _count(own), gradients + 4.0 * _count(own)
    n = min(config.forward_tokens, config.precision.tokens_at_a_time(len(head)))
    activations = HEAD_COPIES * 4.0 * n * len(head) + (0 if head.dtype == torch.float32 else 4.0 * head.numel())
    activations += _activations(model, config, context)
    updating = {"pages": min(pages, KEPT), "gradients": gradients, "activations": activations}
    if device.type == "cpu":
        updating["freed but kept"] = FREED * (gradients + activations)
    sampling = {"pages": pages, "engine": _engine_copy(model, _nbytes(own)) if config.engine == "torch" else 0.0}
    if config.engine == "torch" and records_steps(model, device):
        layer = _pages(model, ROWS[-1], context) / model.config.num_hidden_layers  # of a fused one, they are alike
        sampling["recorded steps"] = min(GATHERED, layer) + 4.0 * sum(ROWS) * head_of(model).weight.shape[0]
    parts = fixed | max(updating, sampling, key=lambda phase: sum(phase.values()))
    if config.processes > 1 and device.type == "cpu":
        each = sum(parts.values()) - fixed["optimizer"] - fixed["reference"] + PROCESS
        parts["other processes"] = (config.processes - 1) * each
    return Memory(parts, _free(device))


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


def _activations(model: PreTrainedModel, config: TrainConfig, context: int) -> float:
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
        casts = _nbytes([*model.parameters()])
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            parameter.grad = torch.empty_like(parameter)  # `estimate` counts it; a narrow weight's comes and goes
    model.config._attn_implementation = _INTERFACE
    sparing = checkpointed(model) if config.gradient_checkpointing else nullcontext()
    ids = torch.zeros(-(-tokens // width), width, dtype=torch.int64, device="meta")
    try:
        with _Alive([*model.parameters(), *model.buffers()]) as alive:
            with sparing:
                states = states_of(model, ids)
            states.backward(torch.empty_like(states))  # type: ignore[no-untyped-call]
        return float(alive.most) + casts
    except AgentRLError:
        raise
    except Exception:  # of a family's code that looks at data, as routers do
        return rough


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


_INTERFACE = "agent_rl_memory"
AttentionInterface.register(_INTERFACE, _attend)


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


def _count(parameters: list[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def _nbytes(parameters: list[Tensor]) -> float:
    return float(sum(p.nbytes for p in parameters))


def _free(device: torch.device) -> float | None:
    """Return the bytes that a device has left; None if it doesn't say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(_available(), default=None)


def _available(root: Path = Path("/")) -> Iterator[float]:
    """Yield what Linux has left, and each control group that this process is in."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        yield 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = root / "sys/fs/cgroup" / next(line for line in lines if line.startswith("0::"))[3:].strip("/")
        for group in (own, *own.parents):
            if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
                yield float(int(most) - used)
