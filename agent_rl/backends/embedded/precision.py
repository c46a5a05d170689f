"""Precision: in which formats the training forward computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agent_rl.config import Section
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

LOGITS_AT_A_TIME = 2**24
"""64 MiB in float32: 29,127 tokens of the default vocabulary of 576, 110 of Qwen's 151,936. Measured: larger pieces
are no faster."""


@contextmanager
def repeatable(on_gpu: bool) -> Iterator[None]:
    """Let sums be the same every time, also on a GPU, whose kernels else add up in any order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or on_gpu)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class PrecisionConfig(Section):
    """Formats of the training forward and backward, under theta, old and the reference alike.

    Weights and the optimizer's state are float32 whatever is set here, as are a fresh model's warm start and the
    engine: a lower precision opens a gap between mu and theta, which `rollout_gap` measures. Log-probabilities and
    entropies are computed from the logits in float32 at least; the sums that metrics report are in float64. Log-ratios
    are clamped to ± 20 before exponentiation, in every objective (`objectives.base.MAX_LOG_RATIO`), correction and
    mismatch metric (a row's after they are summed); the k3 estimate of a KL penalty to 10 (`objectives.kl.MAX_K3`).
    """

    head: Literal["float32", "model"] = "float32"
    """What logits are computed in: float32 even under autocast (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv
    2510.13786), or the format of the layers below."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """What matrix products and attention are computed in; `none` is the weights' float32. `float16` scales the loss,
    halves the scale and skips the update when a gradient overflows, and tries double the scale after 2000 updates."""
    chunk: int = Field(0, ge=0)
    """Tokens whose logits exist at a time; 0 takes as many as have 64 MiB of them. Results don't depend on it, save for
    rounding. More than one chunk costs a second product with the head's weights."""

    @contextmanager
    def region(self, device: torch.device) -> Iterator[None]:
        """Run a model's layers in the format that is set, by the kernels that the backward runs by.

        On a GPU attention is another kernel where algorithms have to be deterministic, as they have to in the backward;
        what is computed again there, for its gradient, must be what the forward computed.
        """
        cast = nullcontext() if self.autocast == "none" else torch.autocast(device.type, getattr(torch, self.autocast))
        with repeatable(device.type == "cuda"), cast:
            yield

    def head_format(self, weight: Tensor) -> torch.dtype:
        """Return the format in which the head of these weights multiplies."""
        if self.head == "float32":
            return torch.promote_types(weight.dtype, torch.float32)
        return weight.dtype if self.autocast == "none" else getattr(torch, self.autocast)

    def tokens_at_a_time(self, vocab_size: int) -> int:
        """Return how many tokens' logits may exist at a time."""
        return self.chunk or max(1, LOGITS_AT_A_TIME // vocab_size)
