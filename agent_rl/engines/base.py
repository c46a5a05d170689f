"""The InferenceEngine protocol: token ids in, token ids out; and how to sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_rl.core.trajectory import Completion
from agent_rl.errors import ConfigError

WeightFormat = Literal["float32", "bfloat16", "float8", "int4"]
"""What an engine's weights are held in."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one draw, with vLLM's names and order: temperature, min-p, then top-k and top-p."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    max_tokens: int = 64
    """Of one reply."""

    def __post_init__(self) -> None:
        bounds = {
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, ">= 0 (0 keeps every token)"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "max_tokens": (self.max_tokens >= 1, ">= 1"),
        }
        for name, (ok, wanted) in bounds.items():
            if not ok:
                raise ConfigError(f"sampling: {name}={getattr(self, name)} must be {wanted}")


class Session(Protocol):
    """One sequence of tokens in an engine, which gets every id once."""

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` to the sequence and sample until a stop id or `params.max_tokens`."""
        ...

    def close(self) -> None:
        """Forget the sequence; a sample under way ends with `FinishReason.ABORT`."""
        ...


class InferenceEngine(Protocol):
    """An inference engine: token ids in, token ids out."""

    @property
    def context_limit(self) -> int | None:
        """The longest sequence it can hold, in tokens, or None if it knows no limit."""
        ...

    def open(self, seed: int) -> Session:
        """Begin a sequence whose random draws depend only on `seed`."""
        ...


class TrainedEngine(InferenceEngine, Protocol):
    """An engine that samples from weights which are being trained."""

    slots: int
    """How many sequences to sample at a time."""
    tokens: int
    """How many tokens it has sampled."""

    @property
    def context_limit(self) -> int:
        """The longest sequence it can hold, in tokens."""
        ...

    def update_weights(self, version: int) -> None:
        """Use the model's present weights from now on; what is sampled is marked with `version`."""
        ...

    def release_weights(self) -> None:
        """Give back the memory of a copy of the weights, if it has one; it can't sample before `update_weights`."""
        ...
