"""What the loss of a row reads of the other rows of its episode, computed before each update."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from agent_rl.algorithms.batch import WeightedRows
from agent_rl.algorithms.components import Part
from agent_rl.algorithms.layouts import Laid, grids
from agent_rl.algorithms.on_tokens import shaped


def sequences_of(
    batch: WeightedRows, flat: Mapping[str, Tensor | None], drift: Part[Tensor] | None, mask: Part[Tensor] | None
) -> Tensor:
    """Return the `Sequences` of a batch's rows, float32 `[B, 5]`.

    Args:
        batch: all rows of an update.
        flat: what objectives read of its tokens by name, `[N]`, under theta before the update.
        drift: what the objective takes the mean of; None for one of tokens.
        mask: the negative mask, if there is one.
    """
    rows, sampled = batch.rows, batch.rows.loss_mask
    index = torch.unique(rows.episode, return_inverse=True)[1]

    def by_episode(of_rows: Tensor) -> Tensor:
        return torch.zeros_like(of_rows).index_add(0, index, of_rows)[index]

    own, length = rows.sum(batch.advantages), by_episode(rows.sum(sampled))
    mean = (by_episode(own) / length.clamp(min=1)).repeat_interleave(rows.lengths)
    moved = torch.zeros_like(own)
    if drift is not None:
        terms = drift(SimpleNamespace(**{**flat, "advantages": mean}))
        moved = rows.sum(torch.where(sampled, terms, 0.0))
    weight = rows.sum(torch.where(batch.counted, batch.weights, 0.0))
    others = (by_episode(weight) - weight) / rows.sum(sampled).clamp(min=1)
    gone = torch.zeros_like(own) if mask is None else _left_out(batch, flat, mask).to(own.dtype)
    return torch.stack([length, by_episode(moved) - moved, by_episode(own) - own, others, gone], -1).float()


def _left_out(batch: WeightedRows, flat: Mapping[str, Tensor | None], mask: Part[Tensor]) -> Tensor:
    """Say which rows are of an episode that the mask leaves out, bool `[B]`: it is given each episode as a row."""
    rows = batch.rows
    gone = torch.zeros(int(rows.episode.max()) + 1, dtype=torch.bool, device=rows.episode.device)
    for grid, of_lines in grids(rows, "lines"):
        gone[of_lines["episode"]] = shaped(mask, mask(Laid(grid, flat, of_lines)), grid.inside.shape[:1])
    return gone[rows.episode]
