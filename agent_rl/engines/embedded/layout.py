"""Layout: the plan of a step, which every layer follows.

A step feeds a ragged batch: `N` tokens laid end to end, sequences that decode (one token) first, then those that
prefill (several). Linear layers see the `N` tokens without padding; attention takes them apart into decoding rows,
which read pages, and blocks of prefilling ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.engines.embedded.pages import PAGE, Pages, Table

Ints = NDArray[np.int64]

SCORES = 2**22
"""Scores that prefilling holds at a time: 16 MiB in float32."""
SHARERS = 8
"""Sequences that read a shared page in one product; more take several."""
SPARSE = 3
"""Reading a page in place costs a third of gathering it first: all are read where at least a third is wanted."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The tokens that one sequence puts into a step; its table holds them already."""

    table: Table
    ids: Sequence[int]

    @property
    def start(self) -> int:
        """The position of its first token."""
        return self.table.length - len(self.ids)


@dataclass(frozen=True, slots=True)
class Reading:
    """Pages as decoding sequences read them: `E` pages, each by up to `M` sequences."""

    pages: Tensor | None
    """Int64 `[E]`; None for the first `E` in order (then nothing is gathered)."""
    readers: Tensor
    """The ragged row of each reader, int64 `[E * M]`; a page that nobody reads has some row."""
    chunk: Tensor
    """How many pages of the sequence come before, int64 `[E]`."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Rows `[0, stop)` of the ragged batch, with one query each."""

    stop: int
    readings: tuple[Reading, ...]
    cells: Tensor
    """Where the parts of each row lie among those of all readings, one after another, int64 `[stop, chunks]`; one more
    than the last of them for none."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Rows `[start, stop)` of the ragged batch, attended together as a padded grid of `P` sequences and `width`."""

    start: int
    stop: int
    width: int
    pages: Tensor
    """Int64 `[P, chunks]`."""
    begin: Tensor
    """The position of each sequence's first query, int64 `[P]`."""
    first: int
    """The least of them."""
    last: int
    """The position of the grid's last query, of the sequence that begins last."""
    cells: Tensor | None
    """The grid cell of each ragged row, int64 `[stop - start]`; None if they coincide."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One step's ragged batch."""

    feeds: tuple[Feed, ...]
    wanted: tuple[int, ...]
    """The feeds after whose last token the next one is wanted; one may be there several times."""
    ids: Tensor
    positions: Tensor
    cells: tuple[Tensor, Tensor]
    """Where each token goes in the cache, two int64 `[N]`: its page and its place in the page."""
    tokens: Ints
    """Ids, positions, pages and places once more, `[4, N]`, on the host."""
    tables: Ints
    """The pages of each feed's sequence, `[feeds, pages]`, on the host; short ones are filled up with their first."""
    last: Tensor | None
    """The rows whose next token is wanted, as `wanted` has them; None if that is every row in order."""
    decoding: Decoding | None
    prefilling: tuple[Prefilling, ...]
    high: int
    """Pages that must be there."""
    fresh: Tensor | None
    """Pages to empty first."""
    copies: Tensor | None
    """Pages to copy after that, `[3, copies]`: from, to, and how many positions of it count."""
    masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Masks that all layers of one kind share."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's tokens without any plan of who decodes and who prefills, int64; some of them may be nobody's."""

    positions: Tensor
    """`[N]`."""
    page: Tensor
    """Where each token's keys and values go, `[N]`."""
    within: Tensor
    """The place in that page, `[N]`."""
    fresh: Tensor
    """Pages to empty first, `[N]`; one may be there several times."""
    tables: Tensor
    """The pages of each token's sequence, `[N, chunks]`."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """Masks that all layers of one window share."""


def plan(feeds: Sequence[Feed], wanted: Sequence[int] | None, pages: Pages, device: torch.device) -> Layout:
    """Plan a step; sequences with one token must come first.

    `wanted` are the feeds after whose last token the next one is wanted; None for all of them.
    """

    def tensor(values: Sequence[int] | Sequence[tuple[int, ...]] | Ints) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    width = max(len(f.table.pages) for f in feeds)
    rows = [[page.number for page in f.table.pages] for f in feeds]
    numbers = np.array([row + row[:1] * (width - len(row)) for row in rows])  # filled up with a page that is written
    counts = np.array([len(f.ids) for f in feeds])
    starts = np.array([f.start for f in feeds])
    ends = counts.cumsum()
    row = np.repeat(np.arange(len(feeds)), counts)
    positions = np.arange(len(row)) + (starts - ends + counts)[row]
    decode = int((counts == 1).sum())
    wanted = range(len(feeds)) if wanted is None else wanted
    last = ends[list(wanted)] - 1
    tokens = np.array([[i for f in feeds for i in f.ids], positions, numbers[row, positions // PAGE], positions % PAGE])
    ids, places, *cells = tensor(tokens)
    return Layout(
        feeds=tuple(feeds),
        wanted=tuple(wanted),
        ids=ids,
        positions=places,
        cells=(cells[0], cells[1]),
        tokens=tokens,
        tables=numbers,
        last=None if np.array_equal(last, np.arange(len(row))) else tensor(last),
        decoding=_decoding(numbers[:decode], starts[:decode], tensor) if decode else None,
        prefilling=tuple(_prefilling(numbers, starts, counts, decode, tensor)),
        high=pages.high,
        fresh=tensor(pages.fresh) if pages.fresh else None,
        copies=tensor(pages.copies).T if pages.copies else None,
    )


def _decoding(numbers: Ints, starts: Ints, tensor: Callable[[Ints], Tensor]) -> Decoding:
    lengths = starts // PAGE + 1
    numbers = numbers[:, : lengths.max()]
    there = np.arange(numbers.shape[1]) < lengths[:, None]
    rows, chunks = there.nonzero()
    wanted = numbers[there]
    order = wanted.argsort(kind="stable")
    found, first, users = np.unique(wanted[order], return_index=True, return_counts=True)
    high = int(found[-1]) + 1
    alone = order[first[users == 1]]
    cells = np.full(numbers.shape, -1)
    if SPARSE * len(found) >= high:
        readers, place = np.zeros(high, np.int64), np.zeros(high, np.int64)
        readers[wanted[alone]], place[wanted[alone]] = rows[alone], chunks[alone]
        cells[rows[alone], chunks[alone]] = wanted[alone]
        readings = [Reading(None, tensor(readers), tensor(place))]
        total = high
    else:
        cells[rows[alone], chunks[alone]] = np.arange(len(alone))
        readings = [Reading(tensor(wanted[alone]), tensor(rows[alone]), tensor(chunks[alone]))]
        total = len(alone)
    sharing = users > 1
    if sharing.any():
        first, users = first[sharing], users[sharing]
        pieces = -(-users // SHARERS)
        members = np.concatenate([order[a : a + n] for a, n in zip(first, users, strict=True)])
        rank = np.arange(len(members)) - (users.cumsum() - users).repeat(users)
        seats = (pieces.cumsum() - pieces).repeat(users) * SHARERS + rank
        readers = np.zeros(pieces.sum() * SHARERS, np.int64)
        readers[seats] = rows[members]
        cells[rows[members], chunks[members]] = total + seats
        heads = order[first].repeat(pieces)
        readings.append(Reading(tensor(wanted[heads]), tensor(readers), tensor(chunks[heads])))
        total += len(readers)
    cells[cells < 0] = total
    return Decoding(len(starts), tuple(readings), tensor(cells))


def _prefilling(
    numbers: Ints, starts: Ints, counts: Ints, begin: int, tensor: Callable[[Ints], Tensor]
) -> Iterator[Prefilling]:
    """Cut the sequences with several tokens, from number `begin` on, into grids of not too many scores."""
    ends = counts.cumsum()
    while begin < len(counts):
        stop, width, length = begin + 1, counts[begin], starts[begin] + counts[begin]
        while stop < len(counts):
            wider, longer = max(width, counts[stop]), max(length, starts[stop] + counts[stop])
            if (stop + 1 - begin) * wider * longer > SCORES // 4:
                break
            stop, width, length = stop + 1, wider, longer
        part = slice(begin, stop)
        own = np.arange(stop - begin).repeat(counts[part])
        within = np.arange(len(own)) - (ends[part] - counts[part] - ends[begin] + counts[begin])[own]
        yield Prefilling(
            start=int(ends[begin] - counts[begin]),
            stop=int(ends[stop - 1]),
            width=int(width),
            pages=tensor(numbers[part, : -(-length // PAGE)]),
            begin=tensor(starts[part]),
            first=int(starts[part].min()),
            last=int(starts[part].max() + width) - 1,
            cells=None if (counts[part] == width).all() else tensor(own * width + within),
        )
        begin = stop
