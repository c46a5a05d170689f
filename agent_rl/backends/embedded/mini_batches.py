"""Mini-batches: the parts of a weighted batch that a step's updates take one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_rl.algorithms import Denominators, WeightedRows
from agent_rl.algorithms.aggregation import shares_of_prompts
from agent_rl.algorithms.updates import UpdatesConfig, deal

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one update learns from."""

    epoch: int
    rows: Tensor
    """int64 `[b]`: which of the rows with a gradient these are."""
    batch: WeightedRows
    whole: Denominators
    """Of all rows of its groups, with a gradient or without one, however they are cut into micro-batches."""


def mini_batches(
    weighed: WeightedRows, wanted: Tensor, batch: WeightedRows, updates: UpdatesConfig, seed: int, step: int
) -> Iterator[MiniBatch]:
    """Yield the mini-batches of a step's updates; none for groups in which no row has a gradient.

    `weighed` are all rows of the step; `wanted`, bool, says which of them `batch` has.
    """
    counts = (weighed.rows.sum(weighed.counted) > 0) | wanted
    for number, (epoch, groups) in enumerate(deal(sorted({*weighed.group[counts].tolist()}), updates, seed, step)):
        chosen = torch.tensor(groups)
        rows = torch.nonzero(torch.isin(batch.group, chosen))[:, 0]
        if updates.most > 1:
            _log.debug("step %d: update %d, epoch %d: groups %s", step + 1, number + 1, epoch + 1, groups)
        if len(rows):
            members = torch.nonzero(torch.isin(weighed.group, chosen))[:, 0]
            every = weighed.select(members)
            part = batch if len(rows) == len(batch) else batch.select(rows)
            if weighed.prompt_shares is not None:
                shares = torch.zeros_like(weighed.prompt_shares)
                shares[members] = shares_of_prompts(every.rows.sum(every.counted), every.group)
                part = replace(part, prompt_shares=shares[wanted][rows])
            yield MiniBatch(epoch, rows, part, every.denominators)
