"""What a trainer asks of the processes of its run; here there is one, `data_parallel.py` has several."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from agent_rl.algorithms import Denominators, WeightedRows
from agent_rl.engines.base import SamplingParams
from agent_rl.rollout import Job

T = TypeVar("T")


class Gradient(NamedTuple):
    """What computing the gradient of a micro-batch also gave."""

    rows: list[int]
    """Of the batch."""
    sums: dict[str, float]
    """To report."""
    logprobs: Tensor
    """float32 `[len(rows), T]`."""


class OneProcess:
    """All that is asked for is done here."""

    def spread(
        self,
        play: Callable[[Sequence[Job], SamplingParams], list[T]],
        jobs: Sequence[Job],
        params: SamplingParams,
        size: int = 1,
    ) -> list[T]:
        """Play jobs by a method of `RolloutSampler`, `size` neighbours together; return its results in their order."""
        return play(jobs, params)

    async def watched(self, share: Coroutine[Any, Any, T]) -> T:
        """Play this process's share while the others are there."""
        return await share

    def gradients(
        self,
        accumulate: Callable[[WeightedRows, Denominators], Iterator[Gradient]],
        batch: WeightedRows,
        whole: Denominators,
    ) -> Iterator[Gradient]:
        """Add the gradients of a batch."""
        return accumulate(batch, whole)

    def update_weights(self, version: int) -> None:
        """Let every process compute with the present weights; `version` is what tokens are marked with."""
