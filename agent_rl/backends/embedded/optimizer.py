"""The optimizer: AdamW, with Muon for the hidden matrices if asked for, and a schedule of their learning rates."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agent_rl.backends.embedded.precision import repeatable
from agent_rl.config import Section
from agent_rl.engines.base import WeightFormat
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


OptimizerKind = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
LARGE = 10_000_000
"""Parameters from which on a model is taken for one that somebody pretrained."""


class OptimizerConfig(Section):
    """Learning rates and what surrounds them."""

    kind: OptimizerKind = "adamw"
    """How AdamW keeps its state, 8 bytes a parameter: `adamw_8bit` in 2 (Dettmers et al. 2021, arXiv 2110.02861), by
    `bitsandbytes`, in blocks of 256 values with a scale; `paged_...` moves a GPU's to the machine's memory when the
    GPU's is short."""
    lr: float | None = Field(None, gt=0)
    """AdamW's; null for 2e-3 of a model with less than 10 million parameters, as those made here have, for 1e-5 of a
    larger one, and for 1e-4 of adapters on that; in RL with `rollout.weights=int4`, for half of it, and shared between
    the `updates` of a batch."""
    muon_lr: float = Field(0.0, ge=0)
    """Muon's, for two-dimensional hidden weights; 0 leaves everything to AdamW."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's, of the mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's, of the mean of their squares."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's and Muon's, decoupled from the gradients; with `start_from` 0, as in a warm start."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A longer gradient of all parameters together is scaled down to this length."""
    warmup_steps: int = Field(5, ge=0)
    """Steps over which learning rates rise, linearly."""
    decay_from: float = Field(0.4, ge=0, le=1)
    """The fraction of the run after which learning rates fall, linearly."""
    final: float = Field(0.05, ge=0, le=1)
    """The fraction of the learning rate that is left at the end."""


def schedule(config: OptimizerConfig, step: int, total: int) -> float:
    """Return the factor of the learning rates at a step (from 0): a linear rise, a plateau, a linear fall."""
    rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    start = config.decay_from * total
    fall = 1.0 if step < start or start >= total else 1.0 - (1.0 - config.final) * (step - start) / (total - start)
    return rise * max(fall, config.final)


def default_lr(model: nn.Module, sampled_by: WeightFormat = "float32", updates: int = 1) -> float:
    """Return AdamW's learning rate where none is set: what suits a small model destroys a pretrained one in a step.

    Episodes `sampled_by` int4 weights take half of it: with all of it the gap between the two policies grew until runs
    collapsed (BENCHMARKS.md), and smaller steps keep it small (Zhang, Li et al. 2026, arXiv:2602.01826).

    Several `updates` of a batch share it: AdamW's steps are as long however few episodes they see, and 16 of full
    length took runs to 0 % (BENCHMARKS.md, Several updates a batch).
    """
    share = (0.5 if sampled_by == "int4" else 1.0) / updates
    if sum(p.numel() for p in model.parameters()) < LARGE:
        return share * 2e-3
    return share * (1e-4 if hasattr(model, "peft_config") else 1e-5)


class Optimizer:
    """Steps those parameters of one model that have a gradient.

    Of a weight in bfloat16 or float16 it holds a float32 copy, its master: gradients are added up and steps are taken
    there, and the weight is the master, rounded. A step is often smaller than the distance to the next bfloat16.

    With `scale_loss`, losses are multiplied, so that float16 gradients don't vanish, by as much as doesn't overflow.
    The format of the weights that episodes are `sampled_by`, and the `updates` of a batch, are for `default_lr`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        scale_loss: bool = False,
        sampled_by: WeightFormat = "float32",
        updates: int = 1,
    ) -> None:
        self.config = config
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        named = [(name, _master(p)) for name, p in trained]
        self.parameters = [p for _, p in named]
        self._copies = [(p, master) for (_, p), master in zip(trained, self.parameters, strict=True) if p is not master]
        looked_up = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Embedding)}
        hidden = [p for name, p in named if config.muon_lr and name not in looked_up and _suits_muon(name, p)]
        rest = [p for p in self.parameters if not any(p is h for h in hidden)]
        betas = (config.beta1, config.beta2)
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if rest:  # adapters are matrices alone
            lr = default_lr(model, sampled_by, updates) if config.lr is None else config.lr
            adamw = _adamw(config.kind)(rest, lr=lr, betas=betas, weight_decay=config.weight_decay)
            self._parts.append((adamw, lr))
        if hidden:
            muon = torch.optim.Muon(hidden, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95)
            self._parts.append((muon, config.muon_lr))
        self.lr = self._parts[0][1]
        """AdamW's, at the schedule's plateau; Muon's where it steps all of them."""
        self._scaler = torch.amp.GradScaler(self.parameters[0].device.type, enabled=scale_loss)
        self.scales_loss = scale_loss

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1 without scaling."""
        return float(self._scaler.get_scale())

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients to those that the next step takes; the same every time, also on a GPU."""
        with repeatable(loss.is_cuda):
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.gather()

    def gather(self) -> None:
        """Add the weights' gradients to those of their masters, as `backward` does with its own."""
        for weight, master in self._copies:
            if weight.grad is not None:
                gradient, weight.grad = weight.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def step(self, scale: float) -> float:
        """Clip the gradients, update, clear them; return their norm before clipping.

        A norm that is not finite skips the update: weights that were good stay so. Where losses are scaled, gradients
        must have come from `backward`, and an overflow halves the scale.
        """
        self.gather()  # of a loss that another optimizer took backward
        for part, _ in self._parts:
            self._scaler.unscale_(part)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        for part, lr in self._parts:
            for group in part.param_groups:
                group["lr"] = lr * scale
            if math.isfinite(norm):
                part.step()
            part.zero_grad(set_to_none=True)
        for weight, master in self._copies:
            weight.data.copy_(master)
        self._scaler.update()
        return norm

    def discard(self) -> None:
        """Drop the gradients that the next step would take."""
        for weight, master in self._copies:
            weight.grad = master.grad = None
        for part, _ in self._parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """Return all that a checkpoint must hold."""
        parts = [part.state_dict() for part, _ in self._parts]
        parts += [self._scaler.state_dict()] if self.scales_loss else []
        return [*parts, {"masters": [master.detach() for _, master in self._copies]}] if self._copies else parts

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Continue from `state_dict`."""
        if self._copies:
            *states, copied = states
            masters: list[Tensor] = copied["masters"]  # type: ignore[assignment]
            for (_, master), saved in zip(self._copies, masters, strict=True):
                master.data.copy_(saved)
        parts: list[torch.optim.Optimizer | torch.amp.GradScaler] = [part for part, _ in self._parts]
        if self.scales_loss:
            parts.append(self._scaler)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)


def require_optimizer(kind: OptimizerKind, device: str) -> None:
    """Refuse a kind of optimizer that this machine can't serve, before anything heavy is imported.

    Raises:
        ConfigError: with the way out.
    """
    if kind != "adamw" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"optimizer.kind={kind} needs bitsandbytes: pip install -e '.[bnb]', or set adamw")
    if kind.startswith("paged") and device == "cpu":
        instead = kind.removeprefix("paged_")
        raise ConfigError(f"optimizer.kind={kind} moves a GPU's state to the CPU's memory: on device=cpu set {instead}")


def _adamw(kind: OptimizerKind) -> Callable[..., torch.optim.Optimizer]:
    if kind == "adamw":
        return partial(torch.optim.AdamW, fused=True)  # one pass over each weight, and no copies of it
    from bitsandbytes import optim

    kinds = {
        "adamw_8bit": optim.AdamW8bit,
        "paged_adamw": optim.PagedAdamW,
        "paged_adamw_8bit": optim.PagedAdamW8bit,
    }
    return kinds[kind]  # type: ignore[no-any-return]


def _master(weight: nn.Parameter) -> nn.Parameter:
    """Return the float32 copy that is stepped in a weight's place; the weight itself if it has that precision."""
    low = weight.dtype in (torch.bfloat16, torch.float16)
    return torch.nn.Parameter(weight.detach().float()) if low else weight


def _suits_muon(name: str, parameter: Tensor) -> bool:
    # embeddings and heads are no hidden matrices; a router on Muon collapses onto few experts (measured)
    others = ("embed", "lm_head", ".gate.weight", "router", "bias")
    return parameter.ndim == 2 and not any(part in name for part in others)
