"""Layouts: how a component is given the tokens of a batch, which lie flat, in the lines that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agent_rl.algorithms.advantages.estimate import AdvantageEstimate
from agent_rl.algorithms.batch import UNKNOWN, Rows
from agent_rl.algorithms.components import Part
from agent_rl.grid import FAIR_LINES, LINES, Grid, cut_lengths


class Laid:
    """What a component reads of a batch's tokens, by name, laid out when it is asked for; and numbers of its lines."""

    def __init__(self, grid: Grid, flat: Mapping[str, Tensor | None], of_lines: Mapping[str, Tensor]) -> None:
        self._grid, self._flat, self._of_lines = grid, flat, of_lines

    def __getattr__(self, name: str) -> Tensor | None:
        if name in self._of_lines:
            return self._of_lines[name]
        if name not in self._flat:
            raise AttributeError(name)
        flat = self._flat[name]
        return None if flat is None else self._grid.lay(flat, -1 if name in UNKNOWN else 0)


def grids(rows: Rows, layout: str, groups: Tensor | None = None) -> Iterator[tuple[Grid, dict[str, Tensor]]]:
    """Yield the grids in which a component is given a batch, and the numbers of their lines; see `Component.layout`.

    Args:
        rows: of the whole batch; an episode's are neighbours.
        layout: the component's.
        groups: int64 `[E]`, of the episodes: for the layout `groups`.
    """
    if layout == "rows":
        yield rows.grid(), {"episode": rows.episode}
        return
    sampled = rows.in_time
    episode = rows.episode[rows.row_of_token[sampled]]
    if layout == "tokens":
        yield Grid(sampled[:, None], torch.ones_like(sampled, dtype=torch.bool)[:, None]), {"episode": episode}
        return
    ids, lengths = torch.unique_consecutive(episode, return_counts=True)
    starts = lengths.cumsum(0) - lengths
    if layout == "groups" and groups is not None:
        of_line = groups[ids]
        parts = [torch.nonzero(of_line == group)[:, 0] for group in torch.unique(of_line)]
    else:
        parts = [torch.tensor(lines, device=ids.device) for lines in cut_lengths(lengths, LINES, FAIR_LINES)]
    for lines in parts:
        grid = Grid.of(starts[lines], lengths[lines])
        yield Grid(sampled[grid.places], grid.inside), {"episode": ids[lines]}


def call(part: Part[Any], rows: Rows, flat: Mapping[str, Tensor | None], *known: object, groups: Any = None) -> Any:
    """Call a component on a whole batch, in its layout.

    Args:
        part: the component.
        rows: of the batch.
        flat: the arrays of its tokens by name, `[N]`.
        known: what else it may read.
        groups: see `grids`.

    Returns:
        Arrays over tokens flat, `[N]`, 0 where it was given none; anything else as the component returned it.
    """
    if part.layout == "rows" and not flat.keys() & set(part.reads):
        # it reads no tokens: no grid as wide as the longest row
        return part(*known, SimpleNamespace(episode=rows.episode))
    size, arrays = len(rows.token_ids), dict[str, Tensor]()
    kind: type[AdvantageEstimate] | None = None
    for grid, of_lines in grids(rows, part.layout, groups):
        found = part(*known, Laid(grid, flat, of_lines))
        kind = AdvantageEstimate if isinstance(found, AdvantageEstimate) else None
        laid = {f.name: getattr(found, f.name) for f in fields(found)} if kind else {"": found}
        if any(not isinstance(x, Tensor) or x.shape != grid.inside.shape for x in laid.values()):
            return found
        for name, part_of_it in laid.items():
            grid.put(part_of_it, arrays.setdefault(name, part_of_it.new_zeros(size)))
    return kind(**arrays) if kind else arrays.get("", torch.zeros(size))
