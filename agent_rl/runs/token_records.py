"""Token records of an update: the rows of its batch, back in the trajectories that they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agent_rl.algorithms import WeightedRows
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.diagnostics import gap_by_age
from agent_rl.algorithms.samples import rows_of
from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import BoolArray, FloatArray
from agent_rl.store.token_records import TokenRecord


@dataclass(frozen=True, slots=True)
class Learned:
    """What an update learned from, until its records are made."""

    weighed: WeightedRows
    """Every row, in its place."""
    kept: Tensor
    """bool `[E]`: the episodes that were trained on."""
    scores: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of micro-batches under the weights before the update: their rows, and the log-probabilities `[b, t]`."""

    def logprobs(self) -> Tensor:
        """Return log-probabilities of tokens under the weights before their first update, `[N]`; NaN without one."""
        found = torch.full_like(self.weighed.scored.old_logprobs, torch.nan)
        for rows, logprobs in self.scores:
            self.weighed.rows.grid(rows).put(logprobs, found)
        return found

    def gap_by_age(self, step: int) -> dict[str, float]:
        """Return the mean gap between old and the weights before the update, by the age of tokens."""
        rows, logprobs = self.weighed.rows, self.logprobs()
        known = rows.loss_mask & logprobs.isfinite()
        gaps = (logprobs - self.weighed.scored.old_logprobs)[known].double().abs()
        return {name: float(mean) for name, mean in gap_by_age(gaps, step - rows.versions[known]).items()}

    def records(self, episodes: Sequence[Episode], step: int, config: AlgorithmConfig) -> list[TokenRecord]:
        """Return what to store.

        Args:
            episodes: of the batch, in the order of its `Experience`; greedy ones are not in it.
            step: counted from 0.
            config: the algorithm's.
        """
        scored, known = self.weighed.scored, config.recomputes_old  # old is the policy before the update
        logprobs = scored.old_logprobs if known else self.logprobs()
        trained = self.kept[scored.rows.episode_of_token]
        pushed = None if config.learns_from_pairs else self.weighed.advantages.masked_fill(~trained, torch.nan)
        return records_of(episodes, step, pushed, logprobs)


def records_of(
    episodes: Sequence[Episode], step: int, advantages: Tensor | None, logprobs: Tensor
) -> list[TokenRecord]:
    """Return the records of a batch's rows, both arrays `[N]`."""
    all_pushed = None if advantages is None else advantages.numpy(force=True)
    all_known, records, start = logprobs.numpy(force=True), list[TokenRecord](), 0
    for episode in episodes:
        for number, trajectory, own in rows_of(episode):
            row, sampled = slice(start, start := start + len(own)), trajectory.loss_mask
            pushed = None if all_pushed is None else _of_sampled(all_pushed[row], own, sampled)
            known = _of_sampled(all_known[row], own, sampled)
            records.append(TokenRecord(episode.id, number, step, pushed, known))
    return records


def _of_sampled(row: FloatArray, own: BoolArray, sampled: BoolArray) -> FloatArray:
    """Return the numbers of a trajectory's sampled tokens; a fork's first were learned from in its parent."""
    return np.where(own, row, np.float32(np.nan))[sampled]
