"""Layouts: the tokens of a batch lie flat, one row after another, and are laid out in lines where someone reads them.

A batch of rows padded to the longest would grow with that one row: 32k tokens in one of a thousand rows are 32 M cells.
Here arrays have one number per token, and a grid is as wide as the longest of the few lines that are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agent_rl.algorithms.advantages.estimate import AdvantageEstimate
from agent_rl.algorithms.components import Part

if TYPE_CHECKING:
    from agent_rl.algorithms.batch import Rows

PADDING, FAIR = 0.03, 0.125
"""The most padding of a grid that is not small, and the part of the token budget from which on it is not."""
LINES, FAIR_LINES = 65_536, 0.02
"""The most padded tokens of lines that a component is given at a time, and what of it is no small grid."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Some tokens of flat arrays, laid out `[b, t]` and padded on the right."""

    places: Tensor
    """int64 `[b, t]`: where in a flat array; anywhere for padding."""
    inside: Tensor
    """bool `[b, t]`: False for padding."""

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor) -> Grid:
        """Lay out lines that begin at these places of a flat array and have these lengths, int64 `[b]` each."""
        steps = torch.arange(int(lengths.max()) if len(lengths) else 0, device=lengths.device)
        inside = steps < lengths[:, None]
        return cls(torch.where(inside, starts[:, None] + steps, 0), inside)

    def lay(self, flat: Tensor, fill: float = 0) -> Tensor:
        """Return `[b, t, ...]` of a flat array `[N, ...]`, with `fill` for padding."""
        if not len(flat):
            return flat.new_full((*self.inside.shape, *flat.shape[1:]), fill)
        outside = ~self.inside.view(*self.inside.shape, *[1] * (flat.dim() - 1))
        return flat[self.places].masked_fill_(outside, fill)

    def put(self, laid: Tensor, flat: Tensor) -> None:
        """Write `[b, t, ...]` back into a flat array; the padding is not looked at."""
        flat[self.places[self.inside]] = laid[self.inside].to(flat.device, flat.dtype)

    def flat(self, laid: Tensor, size: int) -> Tensor:
        """Return a flat array of this size, 0 (or False) where the grid has no token."""
        out = laid.new_zeros(size, *laid.shape[2:])
        self.put(laid, out)
        return out


def cut_lengths(lengths: Tensor, token_budget: int, fair: float = FAIR) -> list[list[int]]:
    """Return the lines of grids of at most `token_budget` padded tokens, similar lengths together.

    One that has a `fair` part of the budget already takes no line that would make more than `PADDING` of it padding. A
    line longer than the budget gets a grid of its own: nothing is dropped or shortened.
    """
    sizes, cuts, tokens = lengths.tolist(), list[list[int]](), 0
    for line in lengths.argsort(descending=True, stable=True).tolist():
        padded = (len(cuts[-1]) + 1) * sizes[cuts[-1][0]] if cuts else token_budget + 1
        filled = tokens + sizes[line]
        if padded <= token_budget and (tokens < fair * token_budget or padded - filled <= PADDING * padded):
            cuts[-1].append(line)
            tokens = filled
        else:
            cuts.append([line])
            tokens = sizes[line]
    return cuts


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


UNKNOWN = frozenset({"turns", "versions", "sources", "routed_experts", "old_experts"})
"""The arrays that are -1 where there is nothing."""


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
    sampled = torch.nonzero(rows.loss_mask)[:, 0]
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
