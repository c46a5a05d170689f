"""Grids: some tokens of flat arrays, laid out in padded lines where someone reads them so.

A batch of rows padded to the longest would grow with that one row: 32k tokens in one of a thousand rows are 32 M cells.
Here arrays have one number per token, and a grid is as wide as the longest of the few lines that are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
