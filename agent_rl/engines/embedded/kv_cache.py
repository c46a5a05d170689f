"""SlotCache: keys and values of many growing sequences, one fixed slot each, and attention over them.

A step feeds a ragged batch: `N` tokens laid end to end, sequences that decode (one token) first, then those that
prefill (several). Linear layers see the `N` tokens without padding; attention runs per block of equal width.

Positions are cut into chunks, and a chunk of all slots lies in one piece of memory. What a step reads is then one run
from the start, not a run per slot and head with gaps between: that doubles the speed of decoding at short contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Positions in a chunk; keys are read up to a multiple of it."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The tokens that one sequence puts into a step."""

    slot: int
    start: int
    """The position of its first token."""
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[start, stop)` of the ragged batch, attended together as a padded `[P, width]` grid."""

    start: int
    stop: int
    width: int
    chunks: int
    """How many chunks of cached positions the block may look at."""
    slots: Tensor | None
    """The slot of each grid row, int64 `[P]`; None for all slots in order (then nothing is gathered)."""
    cells: Tensor | None
    """The grid cell of each ragged row, int64 `[stop - start]`; None if they coincide."""
    mask: Tensor
    """Additive, float `[chunks, P, 1, 1, width or 1, CHUNK]`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One step's ragged batch."""

    ids: Tensor
    positions: Tensor
    cells: tuple[Tensor, Tensor, Tensor]
    """Where each token goes in the cache, three int64 `[N]`: its chunk, its slot and its place in the chunk."""
    last: Tensor | None
    """The rows whose next token is wanted, one per sequence; None if that is every row."""
    blocks: tuple[Block, ...]


class KVCache:
    """Of each layer, keys `[chunks, slots, kv_heads, head_dim, CHUNK]` and values with the last two turned round.

    So laid out, either product of a decoding query runs along contiguous memory.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        chunks = _chunks(max_len)
        shape = (chunks, slots, kv_heads, CHUNK, head_dim)
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.keys = [torch.zeros_like(v).view(*shape[:3], head_dim, CHUNK) for v in self.values]
        self.slots, self.kv_heads, self.max_len, self.head_dim = slots, kv_heads, max_len, head_dim
        self.dtype, self.device = dtype, device
        self._visible = torch.full((chunks, slots, CHUNK), float("-inf"), dtype=dtype, device=device)
        self._visible[0, :, 0] = 0  # an idle row must see something, or its softmax is NaN
        self._positions = torch.arange(chunks * CHUNK, device=device)
        self._scratch: dict[str, Tensor] = {}

    def release(self, slot: int) -> None:
        """Make a slot look empty."""
        self._visible[:, slot] = float("-inf")
        self._visible[0, slot, 0] = 0

    def layout(self, feeds: Sequence[Feed]) -> Layout:
        """Plan a step, each sequence within `max_len`; those with one token must come first."""
        decode = sum(len(f.ids) == 1 for f in feeds)
        ids = [i for f in feeds for i in f.ids]
        positions = self._tensor([f.start + j for f in feeds for j in range(len(f.ids))])
        rows = self._tensor([f.slot for f in feeds for _ in f.ids])
        cells = (positions // CHUNK, rows, positions % CHUNK)
        self._visible[cells] = 0
        blocks = []
        if decode:
            blocks.append(self._decode_block(feeds[:decode]))
        if decode < len(feeds):
            blocks.append(self._prefill_block(feeds[decode:], decode))
        last = self._tensor([len(f.ids) for f in feeds]).cumsum(0) - 1 if len(ids) > len(feeds) else None
        return Layout(self._tensor(ids), positions, cells, last, tuple(blocks))

    def _decode_block(self, feeds: Sequence[Feed]) -> Block:
        chunks = _chunks(max(f.start for f in feeds) + 1)
        slots = self._tensor([f.slot for f in feeds])
        visible = self._visible[:chunks, :, None, None, None]
        if 3 * len(feeds) >= self.slots:  # cheaper to attend idle slots too than to gather the busy ones
            return Block(0, len(feeds), 1, chunks, None, slots, visible)
        return Block(0, len(feeds), 1, chunks, slots, None, visible[:, slots])

    def _prefill_block(self, feeds: Sequence[Feed], start: int) -> Block:
        width = max(len(f.ids) for f in feeds)
        chunks = _chunks(max(f.start + len(f.ids) for f in feeds))
        cells = self._tensor([row * width + j for row, f in enumerate(feeds) for j in range(len(f.ids))])
        query = self._tensor([f.start for f in feeds])[:, None] + self._positions[:width]
        hidden = self._positions[: chunks * CHUNK].view(chunks, 1, 1, CHUNK) > query[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        slots = self._tensor([f.slot for f in feeds])
        return Block(start, start + len(cells), width, chunks, slots, cells, mask[:, :, None, None])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Store a layer's new keys and values and attend to all that is visible, `[N, heads, head_dim]`.

        Queries `[N, heads, head_dim]` are scaled, keys `[N, kv_heads, head_dim]` have their positions applied.
        """
        keys, values = self.keys[layer], self.values[layer]
        chunk, slot, within = layout.cells
        keys[chunk, slot, :, :, within] = k
        values[chunk, slot, :, within] = v
        parts = [self._attend_block(keys, values, q[b.start : b.stop], b) for b in layout.blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_block(self, keys: Tensor, values: Tensor, q: Tensor, block: Block) -> Tensor:
        # Batched matrix products beat scaled_dot_product_attention on CPU at these sizes by a factor of two.
        heads, dim, width, chunks, kv = q.shape[1], self.head_dim, block.width, block.chunks, self.kv_heads
        rows = self.slots if block.slots is None else len(block.slots)
        if block.cells is not None:
            grid = q.new_zeros(rows * width, heads, dim)
            grid[block.cells] = q
            q = grid
        q = q.view(rows, width, kv, heads // kv, dim).permute(0, 2, 3, 1, 4).reshape(rows * kv, -1, dim)
        queries = q.shape[1]  # of one key-value head: its group of heads times the width
        q = q.expand(chunks, -1, -1, -1).reshape(-1, queries, dim)
        scores = self._buffer("scores", len(q), queries, CHUNK)
        torch.bmm(q, self._read("keys", keys, block), out=scores)
        by_chunk = scores.view(chunks, rows, kv, -1, width, CHUNK).permute(1, 2, 3, 4, 0, 5)
        joined = self._buffer("joined", *by_chunk.shape)
        torch.add(by_chunk, block.mask.permute(1, 2, 3, 4, 0, 5), out=joined)
        torch.softmax(joined.flatten(4), -1, out=joined.flatten(4))
        by_chunk.copy_(joined)
        out = self._buffer("out", len(q), queries, dim)
        torch.bmm(scores, self._read("values", values, block), out=out)
        out = out.view(chunks, rows * kv, queries, dim).sum(0)
        out = out.view(rows, kv, -1, width, dim).permute(0, 3, 1, 2, 4).reshape(rows * width, heads, dim)
        return out if block.cells is None else out[block.cells]

    def _read(self, name: str, cached: Tensor, block: Block) -> Tensor:
        """Return a block's keys or values, `[chunks * P * kv_heads, ...]`; no copy if P is all slots."""
        cached = cached[: block.chunks]
        if block.slots is not None:
            gathered = self._buffer(name, block.chunks, len(block.slots), *cached.shape[2:])
            cached = torch.index_select(cached, 1, block.slots, out=gathered)
        return cached.view(-1, *cached.shape[3:])

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Return memory that is kept between calls: faulting in fresh pages can cost more than the arithmetic."""
        size, buffer = math.prod(shape), self._scratch.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._scratch[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return buffer[:size].view(shape)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _chunks(length: int) -> int:
    return -(-length // CHUNK)
