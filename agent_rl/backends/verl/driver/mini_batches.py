"""Mini-batches on verl: whole groups go to an update, and every rank takes equally many rows of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transfer_queue import KVBatchMeta
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from agent_rl.algorithms.updates import UpdatesConfig, deal

_log = logging.getLogger(__name__)


def prompt_of(key: str) -> str:
    """Return the name that verl drew for the task of a row."""
    return key.rsplit("_", 2)[0]


def deal_rows(groups: Sequence[str], updates: UpdatesConfig, *key: int) -> list[list[int]]:
    """Return the rows of each mini-batch of a pass: all of its groups, as `deal` deals them; one group a row.

    Groups are dealt in the order of their names, whatever order their rows came in.
    """
    names = sorted({*groups})
    of_group: dict[str, list[int]] = {name: [] for name in names}
    for row, name in enumerate(groups):
        of_group[name].append(row)
    once = updates.model_copy(update={"epochs": 1})
    found = []
    for number, (_, part) in enumerate(deal(range(len(names)), once, *key)):
        dealt = [names[place] for place in part]
        _log.debug("mini-batch %d: groups %s", number + 1, ", ".join(dealt))
        found.append([row for name in dealt for row in of_group[name]])
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """How a batch is cut into the mini-batches of a pass."""

    parts: list[list[str]]
    """Their keys in verl's queue, without its padding."""
    sizes: list[int]
    """How many rows each has with it."""

    @classmethod
    def of(
        cls, keys: Sequence[str], groups: Mapping[str, str], updates: UpdatesConfig, multiple: int, *seed: int
    ) -> Cut:
        """Cut a batch into parts that padding fills to a multiple.

        Args:
            keys: of its rows: `{prompt}_{session}_{number}`.
            groups: the group of each prompt: verl draws the prompts' names at random.
            updates: how many parts there are.
            multiple: what the size of a part is a multiple of.
            seed: fixes which groups go together.
        """
        dealt = deal_rows([groups[prompt_of(key)] for key in keys], updates, *seed)
        parts = [[keys[row] for row in part] for part in dealt]
        return cls(parts, [-(-len(part) // multiple) * multiple for part in parts])

    def order(self, batch: KVBatchMeta, ranks: int) -> list[int]:
        """Reorder a padded batch, as `rank_order` says; return which mini-batch takes each row."""
        numbers = self.numbers(batch.keys)
        order = rank_order(numbers, [int(tag["seq_len"]) for tag in batch.tags], ranks)
        batch.reorder(order)
        return [numbers[row] for row in order]

    def numbers(self, keys: Sequence[str]) -> list[int]:
        """Return which mini-batch takes each row of a padded batch."""
        number_of = {key: number for number, part in enumerate(self.parts) for key in part}
        missing = (size - len(part) for size, part in zip(self.sizes, self.parts, strict=True))
        padding = (number for number, n in enumerate(missing) for _ in range(n))
        return [number_of[key] if key in number_of else next(padding) for key in keys]


def rank_order(numbers: Sequence[int], lengths: Sequence[int], ranks: int) -> list[int]:
    """Return an order of rows in which each rank's share, one after the other, has equally many of each mini-batch.

    Of every mini-batch, ranks get about the same work, which follows from the rows' lengths in tokens.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for number in range(max(numbers) + 1):
        rows = [row for row, its in enumerate(numbers) if its == number]
        work = calculate_workload(torch.tensor([lengths[row] for row in rows]))
        for share, part in zip(shares, get_seqlen_balanced_partitions(work, ranks, equal_size=True), strict=True):
            share.extend(rows[place] for place in part)
    return [row for share in shares for row in share]
