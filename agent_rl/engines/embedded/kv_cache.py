"""KVCache: keys and values of many growing sequences in pages that are taken as they grow, and attention over them.

Attention of decoding sequences goes page by page, in one product for all pages at once, in place where most of them are
read. A page is read once, also if several sequences share it; the parts of a sequence are joined by their sums of
exponentials, as in flash decoding (Dao et al. 2023). Attention of prefilling sequences goes by blocks of queries, whose
scores take bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agent_rl.engines.embedded.layout import SCORES, Decoding, Feed, Layout, Prefilling, Reading, Rows, plan
from agent_rl.engines.embedded.pages import PAGE, Pages

HIDDEN = -1e30
"""Added to the score of what a query must not see. Finite: a page without anything visible has sums, not NaNs."""
LONG = 512
"""Positions from which on prefilling takes torch's fused kernel on a CPU; it needs about 0.6 of the time there."""


class KVCache:
    """Of each layer, keys `[pages, kv_heads, head_dim, PAGE]` and values `[pages, kv_heads, PAGE, head_dim]`.

    So laid out, either product of a decoding query runs along contiguous memory. Layers get their memory with their
    first step, and more as pages are taken.
    """

    def __init__(self, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_len, self.dtype, self.device = max_len, dtype, device
        self.pages = Pages()
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.moves = 0
        """How many times that memory was taken, moved or given back."""
        self.routes: Tensor | None = None
        """The experts of each position, `[pages, PAGE, layers, top_k]`; None for a dense model."""
        self._mask = torch.empty(0, PAGE, dtype=dtype, device=device)
        self._positions = torch.arange(max_len + PAGE, device=device)
        self._scratch: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the memory held for keys and values."""
        return sum(x.nbytes for x in [*self.keys.values(), *self.values.values()])

    def clear(self) -> None:
        """Give the memory back; no sequence may be left."""
        self.pages = Pages()
        self.keys, self.values, self.routes, self._scratch = {}, {}, None, {}
        self.moves += 1
        self._mask = self._mask[:0].clone()

    def store_routes(self, layout: Layout, experts: Tensor) -> None:
        """Keep the experts of a step's tokens, `[N, layers, top_k]`."""
        if self.routes is None:
            self.routes = experts.new_empty((0, PAGE, *experts.shape[1:]), dtype=torch.int16)
        self.routes = _grown(self.routes, layout.high)
        if layout.copies is not None:
            self.routes[layout.copies[1]] = self.routes[layout.copies[0]]
        self.routes[layout.cells] = experts.to(torch.int16)

    # --- a step's plan -----------------------------------------------------------------------------------------------

    def layout(self, feeds: Sequence[Feed], wanted: Sequence[int] | None = None) -> Layout:
        """Plan a step of sequences within `max_len`, those with one token first; see `layout.plan`."""
        layout = plan(feeds, wanted, self.pages, self.device)
        self._mask = _grown(self._mask, layout.high)
        if layout.fresh is not None:
            self._mask[layout.fresh] = HIDDEN
        if layout.copies is not None:
            hidden = self._positions[:PAGE] >= layout.copies[2][:, None]
            self._mask[layout.copies[1]] = self._mask.new_zeros(hidden.shape).masked_fill_(hidden, HIDDEN)
        self._mask[layout.cells] = 0
        return layout

    # --- a layer's attention -----------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store a layer's new keys and values and attend to all that is visible, `[N, heads, head_dim]`.

        Args:
            layer: its number.
            q: queries, scaled, `[N, heads, head_dim]`.
            k: keys with their positions applied, `[N, kv_heads, head_dim]`.
            v: values, `[N, kv_heads, head_dim]`.
            layout: the step's.
            window: how many positions a query sees, its own among them; None for all before it.
            softcap: scores `s` become `softcap * tanh(s / softcap)`.
            sinks: a score of each head, `[heads]`, that takes its share of the softmax and brings no value.
        """
        keys, values = self.reserve(layer, k, v, layout.high)
        for memory in (keys, values):
            if layout.fresh is not None:
                memory[layout.fresh] = 0
            if layout.copies is not None:
                memory[layout.copies[1]] = memory[layout.copies[0]]
        page, within = layout.cells
        keys[page, :, :, within] = k
        values[page, :, within] = v
        limit = window if window and window < self.max_len else 0
        how = (limit, softcap or 0.0, sinks)
        parts = []
        if layout.decoding is not None:
            parts.append(self._decode(keys, values, q[: layout.decoding.stop], layout, layout.decoding, *how))
        for block in layout.prefilling:
            parts.append(self._prefill(keys, values, q[block.start : block.stop], layout, block, *how))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def reserve(self, layer: int, k: Tensor, v: Tensor, high: int) -> tuple[Tensor, Tensor]:
        """Return a layer's memory with room for `high` pages; `k` and `v` `[N, kv_heads, head_dim]` show the sizes."""
        pair = []
        for kept, new, shape in (
            (self.keys, k, (k.shape[1], k.shape[2], PAGE)),
            (self.values, v, (v.shape[1], PAGE, v.shape[2])),
        ):
            memory = kept.get(layer)
            if memory is None:
                memory = new.new_empty((0, *shape), dtype=self.dtype)
            kept[layer] = _grown(memory, high)
            self.moves += kept[layer] is not memory
            pair.append(kept[layer])
        return pair[0], pair[1]

    def attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, window: int | None) -> Tensor:
        """Do as `attend` does, in the same operations on the same shapes whatever the step: a GPU can replay them.

        Each token reads the pages of its own sequence, gathered, up to its own position, also those of a sequence that
        feeds several. The layer's memory must be there.
        """
        keys, values = self.keys[layer], self.values[layer]
        (n, heads, dim), kv = q.shape, keys.shape[1]
        for memory in (keys, values):
            memory.index_fill_(0, rows.fresh, 0)
        keys[rows.page, :, :, rows.within] = k
        values[rows.page, :, rows.within] = v
        chunks = rows.tables.shape[1]
        scores = q.reshape(n, 1, kv, heads // kv, dim) @ keys[rows.tables]  # [n, chunks, kv, group, PAGE]
        scores += self._rows_mask(rows, window)
        weights = scores.permute(0, 2, 3, 1, 4).flatten(3).softmax(-1)
        weights = weights.view(n, kv, heads // kv, chunks, PAGE).permute(0, 3, 1, 2, 4)
        return (weights @ values[rows.tables]).sum(1).view(n, heads, -1)

    def _rows_mask(self, rows: Rows, window: int | None) -> Tensor:
        """Return the additive mask `[N, chunks, 1, 1, PAGE]`."""
        limit = window or 0
        if limit not in rows.masks:
            keys = self._positions[: rows.tables.shape[1] * PAGE].view(-1, 1, 1, PAGE)
            queries = rows.positions.view(-1, 1, 1, 1, 1)
            rows.masks[limit] = self._mask_of(queries, keys, limit)
        return rows.masks[limit]

    def _decode(
        self,
        keys: Tensor,
        values: Tensor,
        q: Tensor,
        layout: Layout,
        decoding: Decoding,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        rows, heads, out_dim = len(q), q.shape[1], values.shape[-1]
        seats = [len(r.readers) for r in decoding.readings]
        total = sum(seats)
        largest = self._buffer("largest", total + 1, heads)
        sums = self._buffer("sums", total + 1, heads)
        outs = self._buffer("outs", total + 1, heads, out_dim)
        largest[total], sums[total], outs[total] = HIDDEN, 0, 0
        begin = 0
        for index, (reading, count) in enumerate(zip(decoding.readings, seats, strict=True)):
            part = slice(begin, begin + count)
            mask = self._page_mask(reading, index, window, layout)
            results = largest[part], sums[part], outs[part]
            self._read(keys, values, q, reading, mask, softcap, results)
            begin += count
        cells = decoding.cells.flatten()
        if decoding.cells.shape[1] == 1:
            sums, outs = sums[cells], outs[cells]
            top = largest[cells]
        else:
            parts = largest[cells].view(rows, -1, heads)
            top = parts.amax(1)
            weights = (parts - top[:, None]).exp_()
            sums = (weights * sums[cells].view(rows, -1, heads)).sum(1)
            outs = (weights[..., None] * outs[cells].view(rows, -1, heads, out_dim)).sum(1)
        if sinks is not None:
            sums = sums + (sinks - top).exp()
        return outs / sums[..., None]

    def _read(
        self,
        keys: Tensor,
        values: Tensor,
        q: Tensor,
        reading: Reading,
        mask: Tensor,
        softcap: float,
        results: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write each reader's largest score, its sum of exponentials and its weighted sum of values."""
        (heads, dim), kv = q.shape[1:], keys.shape[1]
        count = len(reading.chunk)
        sharers, group = len(reading.readers) // count if count else 1, heads // kv
        if not count:
            return
        if reading.pages is None:
            keys, values = keys[:count], values[:count]
        else:
            keys = torch.index_select(keys, 0, reading.pages, out=self._buffer("keys", count, *keys.shape[1:]))
            values = torch.index_select(values, 0, reading.pages, out=self._buffer("values", count, *values.shape[1:]))
        queries = q.index_select(0, reading.readers).view(count, sharers, kv, group, dim).transpose(1, 2)
        queries = queries.reshape(count * kv, sharers * group, dim)
        scores = self._buffer("scores", count * kv, sharers * group, PAGE)
        torch.bmm(queries, keys.flatten(0, 1), out=scores)
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_page = scores.view(count, kv, sharers, group, PAGE)
        by_page += mask
        largest = by_page.amax(-1, keepdim=True)
        by_page.sub_(largest).exp_()
        outs = torch.bmm(scores, values.flatten(0, 1)).view(count, kv, sharers, group, -1)
        for result, found in zip(results, (largest[..., 0], by_page.sum(-1), outs), strict=True):
            result.view(count, sharers, kv, group, *found.shape[4:]).copy_(found.transpose(1, 2))

    def _page_mask(self, reading: Reading, index: int, window: int, layout: Layout) -> Tensor:
        """Return the additive mask of a step's reading, `[E, 1, 1 or M, 1, PAGE]`."""
        key = (window, index)
        if key not in layout.masks:
            mask = self._mask[: len(reading.chunk)] if reading.pages is None else self._mask[reading.pages]
            mask = mask[:, None, None, None]
            if window:
                queries = layout.positions[reading.readers].view(len(mask), 1, -1, 1, 1)
                positions = reading.chunk[:, None] * PAGE + self._positions[:PAGE]
                outside = positions[:, None, None, None] <= queries - window
                mask = mask.expand(outside.shape).masked_fill(outside, HIDDEN)
            layout.masks[key] = mask
        return layout.masks[key]

    def _prefill(
        self,
        keys: Tensor,
        values: Tensor,
        q: Tensor,
        layout: Layout,
        block: Prefilling,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        rows, chunks = block.pages.shape
        (heads, dim), kv, width = q.shape[1:], keys.shape[1], block.width
        if block.cells is not None:
            grid = q.new_zeros(rows * width, heads, dim)
            grid[block.cells] = q
            q = grid
        q = q.view(rows, width, kv, heads // kv, dim).permute(0, 2, 3, 1, 4)
        flat = block.pages.flatten()
        out_dim = values.shape[-1]
        keys = torch.index_select(keys, 0, flat, out=self._buffer("keys", len(flat), *keys.shape[1:]))
        values = torch.index_select(values, 0, flat, out=self._buffer("values", len(flat), *values.shape[1:]))
        if not (window or softcap or sinks is not None) and dim == out_dim and self._is_long(block):
            out = self._prefill_long(keys.view(rows, chunks, kv, dim, PAGE), values, q, block.first)
            return out if block.cells is None else out[block.cells]
        keys = keys.view(rows, chunks, kv, dim, PAGE).permute(0, 2, 3, 1, 4)
        keys = self._buffer("long_keys", *keys.shape).copy_(keys).view(rows * kv, dim, -1)
        values = values.view(rows, chunks, kv, PAGE, out_dim).transpose(1, 2)
        values = self._buffer("long_values", *values.shape).copy_(values).view(rows * kv, -1, out_dim)
        step = max(16, SCORES // (rows * heads * chunks * PAGE))
        parts = []
        for low in range(0, width, step):
            high = min(low + step, width)
            end = min(block.last - width + 1 + high, chunks * PAGE)
            queries = q[:, :, :, low:high].reshape(rows * kv, -1, dim)
            scores = self._buffer("scores", len(queries), queries.shape[1], end)
            torch.bmm(queries, keys[:, :, :end], out=scores)
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
            begin = 0 if window else block.first + low  # all before is visible
            scores.view(rows, heads, high - low, end)[..., begin:] += self._grid_mask(
                layout, block, (low, high, begin, end), window
            )
            share = None
            if sinks is not None:
                share = torch.sigmoid(scores.view(rows, heads, -1, end).logsumexp(-1) - sinks[:, None])
            torch.softmax(scores, -1, out=scores)
            out = torch.bmm(scores, values[:, :end]).view(rows, heads, high - low, out_dim)
            parts.append(out if share is None else out * share[..., None])
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        out = out.transpose(1, 2).reshape(rows * width, heads, out_dim)
        return out if block.cells is None else out[block.cells]

    def _is_long(self, block: Prefilling) -> bool:
        """Return whether a block's sequences begin at one position and are worth the fused kernel."""
        begins_together = block.last - block.width + 1 == block.first
        return self.device.type == "cpu" and begins_together and block.first + block.width >= LONG

    def _prefill_long(self, keys: Tensor, values: Tensor, q: Tensor, first: int) -> Tensor:
        """Attend in the fused kernel: to all before the block, which is visible, and causally to the block itself.

        Args:
            keys: `[P, chunks, kv_heads, head_dim, PAGE]`.
            values: `[P * chunks, kv_heads, PAGE, head_dim]`.
            q: `[P, kv_heads, group, width, head_dim]`.
            first: the position of the first query.

        Returns:
            `[P * width, heads, head_dim]`.
        """
        rows, kv, group, width, dim = q.shape
        keys, values = keys.permute(0, 2, 1, 4, 3), values.view(rows, -1, kv, PAGE, dim).transpose(1, 2)
        keys = self._buffer("long_keys", *keys.shape).copy_(keys).view(rows, kv, -1, dim)
        values = self._buffer("long_values", *values.shape).copy_(values).view(rows, kv, -1, dim)
        attend, last = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, first + width
        own = [x[:, :, first:last].repeat_interleave(group, 1) for x in (keys, values)]
        out, sums = attend(q.reshape(rows, kv * group, width, dim), *own, 0.0, True, scale=1.0)
        if first:
            before = keys[:, :, :first], values[:, :, :first]
            other, its = attend(q.reshape(rows, kv, group * width, dim), *before, 0.0, False, scale=1.0)
            share = torch.sigmoid(its.reshape(sums.shape) - sums)[..., None].to(out.dtype)  # of logarithms of sums
            out = torch.lerp(out, other.reshape(out.shape), share)
        found: Tensor = out.transpose(1, 2).reshape(rows * width, kv * group, dim)
        return found

    def _grid_mask(self, layout: Layout, block: Prefilling, part: tuple[int, int, int, int], window: int) -> Tensor:
        """Return the additive mask `[P, 1, queries, keys]` of queries `low..high` and keys `begin..end`."""
        key = (block.start, *part, window)
        if key not in layout.masks:
            low, high, begin, end = part
            queries = block.begin[:, None, None, None] + self._positions[low:high, None]
            layout.masks[key] = self._mask_of(queries, self._positions[begin:end], window)
        return layout.masks[key]

    def _mask_of(self, queries: Tensor, keys: Tensor, window: int) -> Tensor:
        """Return what to add to the scores of queries and keys at these positions, which are broadcast."""
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, HIDDEN)

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Return memory that is kept between calls: faulting in fresh pages can cost more than the arithmetic."""
        size, buffer = math.prod(shape), self._scratch.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._scratch[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return buffer[:size].view(shape)


def _grown(memory: Tensor, count: int) -> Tensor:
    """Return memory of at least `count` rows, half as many again as there were if it has to move."""
    if len(memory) >= count:
        return memory
    larger = memory.new_empty((max(count, len(memory) * 3 // 2), *memory.shape[1:]))
    larger[: len(memory)] = memory
    return larger
