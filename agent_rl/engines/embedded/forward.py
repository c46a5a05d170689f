"""One inference step over a paged cache, and the fused one of Llama's kind; `module_forward` has all others'."""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from agent_rl.engines.embedded.adapters import weight_of
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.layout import Layout
from agent_rl.engines.embedded.parts import body_of, head_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed."""

    logits: Tensor
    """`[sequences, vocabulary]`, for the last token that each sequence fed."""
    experts: Tensor | None
    """`[N, layers, top_k]` for every token that was fed; None for a dense model."""


class Forward(Protocol):
    """Runs a step; `refresh` is called after the model's weights changed, and before the first step after `release`."""

    def __call__(self, layout: Layout) -> StepOutput:
        """Feed `layout` and return the next-token logits."""
        ...

    def refresh(self) -> None:
        """Take over the model's present weights."""
        ...

    def release(self) -> None:
        """Give back the memory of a copy of the weights."""
        ...


Linear = Callable[[Tensor], Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor, int | None], Tensor]
"""A layer's attention: its number, queries, keys, values, and how many positions a query sees."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, laid out for few and large matrix products."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    """`[heads + kv_heads, head_dim]`; the queries' part holds the attention's scale too. Without norms, `qkv` does."""
    window: int | None
    """How many positions a query sees; None for all before it."""
    out: Linear
    mlp_norm: Tensor
    experts: list[tuple[Linear, Linear]]
    """(gate and up, down) of each expert; a dense layer has one."""
    router: Linear | None


class FusedForward:
    """Llama and its like with fused projections: the same arithmetic as transformers', in fewer kernels.

    Queries and keys may be normalised (Qwen3), projections of attention may have biases (Qwen2), MLPs may be mixtures.

    Two to three times faster than the modules for models whose step is bound by dispatch. It holds its own copy of the
    fused weights, taken at `refresh`.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = head_dim_of(config)
        self.eps = config.rms_norm_eps
        self.head_dtype = torch.promote_types(cache.dtype, torch.float32)
        self.top_k = getattr(config, "num_experts_per_tok", 0)
        self.normalise_gates = getattr(config, "norm_topk_prob", False)
        positions = torch.arange(cache.max_len, device=cache.device)[None]
        cos, sin = body_of(model).rotary_emb(torch.zeros(1, device=cache.device), positions)
        half = self.dim // 2
        self.cos = cos[0].to(cache.dtype)
        # rotate_half(x) * sin == roll(x, half) * (-sin, sin): one kernel instead of a slice, a negation and a cat
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1).to(cache.dtype)
        self.refresh()

    def release(self) -> None:
        """Give back the memory of the fused weights."""
        self.layers: list[_Layer] = []
        self.embedding = self.final_norm = torch.empty(0)
        self.head: Linear = nn.Identity()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's present weights."""
        base = body_of(self.model)
        self.release()
        self.layers += map(self._fused, base.layers)
        self.embedding, self.final_norm = self._take(base.embed_tokens.weight), self._take(base.norm.weight)
        self.head = _linear(head_of(self.model).weight.detach().to(self.head_dtype))

    def _fused(self, layer: Any) -> _Layer:
        """Copy a layer's weights into fewer and larger ones."""
        take, attention, mlp = self._take, layer.self_attn, layer.mlp
        q, k, v, out = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        if normed := hasattr(attention, "q_norm"):
            q_norm = attention.q_norm.weight.expand(self.heads, -1) * attention.scaling
            k_norm = attention.k_norm.weight.expand(self.kv_heads, -1)
        scale = 1.0 if normed else attention.scaling
        if moe := hasattr(mlp, "experts"):
            experts = list(zip(take(mlp.experts.gate_up_proj), take(mlp.experts.down_proj), strict=True))
        else:
            experts = [(take(weight_of(mlp.gate_proj), weight_of(mlp.up_proj)), take(weight_of(mlp.down_proj)))]
        return _Layer(
            input_norm=take(layer.input_layernorm.weight),
            qkv=_linear(
                take(weight_of(q) * scale, weight_of(k), weight_of(v)),
                None if q.bias is None else take(q.bias * scale, k.bias, v.bias),
            ),
            qk_norm=take(q_norm, k_norm) if normed else None,
            window=_window_of(attention, self.model.config),
            out=_linear(take(weight_of(out)), None if out.bias is None else take(out.bias)),
            mlp_norm=take(layer.post_attention_layernorm.weight),
            experts=[(_linear(gate_up), _linear(down)) for gate_up, down in experts],
            router=_linear(take(mlp.gate.weight)) if moe else None,
        )

    def _take(self, *weights: Tensor) -> Tensor:
        return torch.cat([w.detach() for w in weights]).to(self.cache.dtype)

    @torch.no_grad()
    def __call__(self, layout: Layout) -> StepOutput:
        """Feed `layout` and return the next-token logits."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
            return self.cache.attend(layer, q, k, v, layout, window=window)

        return self.run(layout.ids, layout.positions, attend, layout.last)

    def run(self, ids: Tensor, positions: Tensor, attend: Attend, last: Tensor | None) -> StepOutput:
        """Feed tokens and return the logits after all of them, or after the rows `last`."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        routes = []
        for index, layer in enumerate(self.layers):
            x += self._attention(index, layer, self._norm(x, layer.input_norm), cos, sin, attend)
            h = self._norm(x, layer.mlp_norm)
            if layer.router is None:
                x += _swiglu(h, *layer.experts[0])
            else:
                y, experts = self._mixture(h, layer, layer.router)
                x += y
                routes.append(experts)
        if last is not None:
            x = x[last]
        logits = self.head(self._norm(x, self.final_norm).to(self.head_dtype))
        return StepOutput(logits, torch.stack(routes, 1) if routes else None)

    def _attention(self, index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        n, rotated = len(h), self.heads + self.kv_heads
        qkv = layer.qkv(h).view(n, rotated + self.kv_heads, self.dim)
        qk = qkv[:, :rotated]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.dim,), None, self.eps) * layer.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(self.dim // 2, -1), sin)
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:]
        out = attend(index, q, k, v, layer.window)
        return layer.out(out.reshape(n, -1))

    def _mixture(self, h: Tensor, layer: _Layer, router: Linear) -> tuple[Tensor, Tensor]:
        probabilities = F.softmax(router(h), -1, dtype=torch.float32)
        gates, experts = probabilities.topk(self.top_k, -1)
        if self.normalise_gates:
            gates = gates / gates.sum(-1, keepdim=True)
        picks, y = experts.flatten(), torch.zeros_like(h)
        order = picks.argsort(stable=True)
        counts = picks.bincount(minlength=len(layer.experts)).tolist()  # a GPU is waited for here only
        rows, gates = order // self.top_k, gates.to(h.dtype).flatten()[order, None]
        for expert, row, gate in zip(layer.experts, torch.split(rows, counts), torch.split(gates, counts), strict=True):
            if len(row):
                y.index_add_(0, row, _swiglu(h[row], *expert) * gate)
        return y, experts

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def _window_of(attention: nn.Module, config: PretrainedConfig) -> int | None:
    """Return the sliding window of a layer's attention; Mistral's layers ask the config for it, Llama's know none."""
    window: int | None = getattr(config if config.model_type == "mistral" else attention, "sliding_window", None)
    return window


def _swiglu(h: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    gate, up = gate_up(h).chunk(2, -1)
    return down(F.silu(gate).mul_(up))


def is_fusible(config: PretrainedConfig) -> bool:
    """Return whether `FusedForward` does what a model of this configuration does, unless a layer attends in chunks."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        config.model_type in ("qwen3", "qwen3_moe", "qwen2", "llama", "mistral")
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope in ("default", "linear", "llama3", "yarn")  # whose phases don't depend on the sequence's length
    )


def head_dim_of(config: PretrainedConfig) -> int:
    """Return the size of an attention head; not every family writes it down."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@functools.cache
def packs_weights() -> bool:
    """Return whether weights are packed for oneDNN: on CPUs that are not Intel's, where that is the faster way.

    torch's own products take MKL, which is slow on AMD's CPUs (oneDNN is up to twice as fast) and the faster one by a
    fifth on Intel's. A rule instead of a timing: a run that is resumed on its machine must take the same kernels.
    """
    cpus = Path("/proc/cpuinfo")
    intel = "GenuineIntel" in (cpus.read_text() if cpus.exists() else platform.processor())
    chosen = torch.backends.mkldnn.enabled and not intel
    _log.debug("float32 linear layers of the engine run on %s", "oneDNN" if chosen else "torch's own kernels")
    return bool(chosen)


def _linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return `x -> x @ weight.T + bias`, with the weight packed where that is faster.

    oneDNN keeps a kernel of about 1 MiB for every number of rows that it has met, so it gets to see only those of
    `_ROWS`.
    """
    if weight.device.type != "cpu" or weight.dtype not in _PACKED or not packs_weights():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def multiply(x: Tensor) -> Tensor:
        n = len(x)
        rows = next(r for r in _ROWS if r >= n)
        if rows > n:
            x = F.pad(x, (0, 0, 0, rows - n))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return y[:n]

    def apply(x: Tensor) -> Tensor:
        return multiply(x) if len(x) <= _ROWS[-1] else torch.cat([multiply(part) for part in torch.split(x, _ROWS[-1])])

    return apply


_PACKED = (torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []))
_ROWS = (1, 4, 16, 32, 48, 64, 96, 128, 192, 256)
