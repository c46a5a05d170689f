"""Batches at the stages that tests start from; they may write arrays of tokens down by row, `[B, T]`."""

import pytest
import torch
from torch import Tensor

from agent_rl.algorithms import Algorithm, Denominators, Experience, Rows, ScoredRows, WeightedRows
from agent_rl.config import choices

PRESETS = [
    pytest.param(name, marks=pytest.mark.sandbox) if name.endswith("-paper") else name for name in choices("algorithm")
]
"""To parametrize by; NAME-paper in `make test-sandbox` alone, for time."""


def flat(rows: Rows, array: Tensor) -> Tensor:
    """Return an array of tokens as a batch holds it."""
    return rows.grid().flat(array, len(rows.token_ids)) if array.shape[:1] != rows.token_ids.shape else array


def by_row(rows: Rows, array: Tensor) -> Tensor:
    """Return a batch's array of tokens, `[B, T]`."""
    return rows.grid().lay(array)


def scored(rows: Rows, **found: Tensor) -> ScoredRows:
    """Return rows with scores; old is mu unless `old_logprobs` is given."""
    arrays = {name: flat(rows, array) for name, array in found.items()}
    return ScoredRows(rows, arrays.pop("old_logprobs", rows.rollout_logprobs), **arrays)


def weighted(stage: Rows | ScoredRows, **changes: Tensor) -> WeightedRows:
    """Return rows of advantage 0 and weight 1, all in one group, with some arrays changed."""
    rows, mask = stage.rows, stage.rows.loss_mask
    arrays = {"advantages": torch.zeros_like(rows.rollout_logprobs), "weights": mask.float(), "counted": mask}
    arrays |= {name: array if name == "group" else flat(rows, array) for name, array in changes.items()}
    arrays.setdefault("group", torch.zeros(len(rows), dtype=torch.int64))
    return WeightedRows(stage if isinstance(stage, ScoredRows) else scored(stage), **arrays)


def weigh(
    algorithm: Algorithm, x: Experience, given: ScoredRows | None = None, **found: Tensor
) -> tuple[WeightedRows, Denominators]:
    """Compute the weights of an experience whose rows have these scores, as one micro-batch."""
    batch, whole = algorithm.compute_weights(x, scored(x.rows, **found) if given is None else given)
    return batch.padded(), whole
