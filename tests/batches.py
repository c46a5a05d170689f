"""Batches at the stages that tests start from."""

import torch
from torch import Tensor

from agent_rl.algorithms import Algorithm, Denominators, Experience, Rows, ScoredRows, WeightedRows
from agent_rl.config import choices

PRESETS = [name for name in choices("algorithm") if not name.endswith("-paper")]
"""Those with parts of their own: NAME-paper has NAME's with other numbers; tests/test_fidelity.py has them."""


def scored(rows: Rows, **found: Tensor) -> ScoredRows:
    """Return rows with scores; old is mu unless `old_logprobs` is given."""
    return ScoredRows(rows, found.pop("old_logprobs", rows.rollout_logprobs), **found)


def weighted(stage: Rows | ScoredRows, **changes: Tensor) -> WeightedRows:
    """Return rows of advantage 0 and weight 1, all in one group, with some arrays changed."""
    mask = stage.rows.loss_mask
    arrays = {"advantages": torch.zeros_like(stage.rows.rollout_logprobs), "weights": mask.float(), "counted": mask}
    arrays["group"] = torch.zeros(len(mask), dtype=torch.int64)
    return WeightedRows(stage if isinstance(stage, ScoredRows) else scored(stage), **arrays | changes)


def weigh(algorithm: Algorithm, x: Experience, **found: Tensor) -> tuple[WeightedRows, Denominators]:
    """Compute the weights of an experience whose rows have these scores."""
    return algorithm.compute_weights(x, scored(x.rows, **found))
