"""GraphedForward: steps of few tokens on a GPU, recorded once as a CUDA graph and replayed.

Such a step computes for a tenth to a third of the time that Python takes to launch its kernels, which a graph launches
at once. A graph is one list of kernels on one set of addresses: it needs the same shapes in every step. So a step is
rounded up to one of a few sizes, and every token attends by itself (`KVCache.attend_rows`), whether its sequence
decodes or prefills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.engines.embedded.forward import FusedForward, StepOutput, is_fusible
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.layout import Layout, Rows
from agent_rl.engines.embedded.pages import PAGE
from agent_rl.moe.routes import experts_of

ROWS = (16, 64, 128, 256)
"""Tokens that a recorded step may have, few sizes as recording takes as long as a step without graphs. A step with more
tokens is bound by its arithmetic, and not recorded."""
GATHERED = 2**28
"""Bytes of keys and values that a layer of a recorded step may gather; longer contexts are read in place."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step of one size."""

    inputs: Tensor
    """Int64 `[5 + chunks, rows]`: ids, positions, pages, places, fresh pages, and the tables."""
    replay: Callable[[], Tensor]
    """Computes logits `[rows, vocabulary]`, which last until the next replay."""


def records_steps(model: PreTrainedModel, device: torch.device) -> bool:
    """Return whether `GraphedForward` suits a model: experts are chosen on the host, between two kernels."""
    return device.type == "cuda" and is_fusible(model.config) and not experts_of(model)


class GraphedForward:
    """`FusedForward` of a dense model, with graphs; without a GPU the same operations are run one by one."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.fused, self.cache = FusedForward(model, cache), cache
        self._recorder = _Recorder() if cache.device.type == "cuda" else None
        self._forget()

    def _forget(self) -> None:
        """Drop what was recorded on weights or a cache that are elsewhere now."""
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._moves = self.cache.moves
        if self._recorder is not None:
            self._recorder.renew()

    def refresh(self) -> None:
        """Take over the model's present weights."""
        self._forget()
        self.fused.refresh()

    def release(self) -> None:
        """Give back the memory of the fused weights, and of what was recorded with them."""
        self._forget()
        self.fused.release()

    @torch.no_grad()
    def __call__(self, layout: Layout) -> StepOutput:
        """Feed `layout` and return the next-token logits."""
        size = self._size(layout)
        if size is None:
            return self.fused(layout)
        self._reserve(layout.high + 1)
        if self._moves != self.cache.moves:
            self._forget()
        (rows, chunks), n = size, layout.tokens.shape[1]
        inputs = np.full((5 + chunks, rows), layout.high)  # the page behind the last one takes what is nobody's
        inputs[:4, n:] = [[0], [0], [layout.high], [0]]
        inputs[:4, :n] = layout.tokens
        fresh = self.cache.pages.fresh
        inputs[4, : len(fresh)] = fresh
        counts = [len(feed.ids) for feed in layout.feeds]
        tables = layout.tables.repeat(counts, 0).T
        inputs[5:, :n] = tables[:1]  # filled up with a page that is written, as `layout.plan` does
        inputs[5 : 5 + len(tables), :n] = tables
        step = self._recorded.get(size)
        if step is None:
            step = self._recorded[size] = self._record(torch.from_numpy(inputs).to(self.cache.device))
        else:
            step.inputs.copy_(torch.from_numpy(inputs))
        logits = step.replay()
        return StepOutput(logits[:n] if layout.last is None else logits[layout.last], None)

    def _reserve(self, pages: int) -> None:
        fused, last = self.fused, len(self.fused.layers) - 1
        if last in self.cache.keys and len(self.cache.keys[last]) >= pages:
            return
        like = torch.empty(0, fused.kv_heads, fused.dim, dtype=self.cache.dtype, device=self.cache.device)
        for layer in range(last + 1):
            self.cache.reserve(layer, like, like, pages)

    def _size(self, layout: Layout) -> tuple[int, int] | None:
        """Return the rows and chunks of the recorded step that a step is rounded up to; None if there is none."""
        n, pages = layout.tokens.shape[1], layout.tables.shape[1]
        rows = next((size for size in ROWS if size >= n), None)
        if rows is None or layout.copies is not None:
            return None
        chunks = min(1 << (pages - 1).bit_length(), -(-self.cache.max_len // PAGE))
        page = 2 * PAGE * self.fused.kv_heads * self.fused.dim * self.cache.dtype.itemsize
        return (rows, chunks) if rows * chunks * page <= GATHERED else None

    def _record(self, inputs: Tensor) -> _Recorded:
        def run() -> Tensor:
            ids, positions, page, within, fresh = inputs[:5]
            rows = Rows(positions, page, within, fresh, inputs[5:].T)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
                return self.cache.attend_rows(layer, q, k, v, rows, window)

            return self.fused.run(ids, positions, attend, None).logits

        return _Recorded(inputs, self._recorder.record(run, inputs.shape) if self._recorder else run)


class _Recorder:
    """Records what functions do on a GPU; all that it recorded shares memory."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._run = set[torch.Size]()
        self.renew()

    def renew(self) -> None:
        """Share no memory with what was recorded before."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor], shape: torch.Size) -> Callable[[], Tensor]:
        """Return what does again as `run` did, and returns the same tensor with new values.

        The first `run` of a shape is not recorded: libraries load their kernels, and take memory of their own.
        """
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            if shape not in self._run:
                run()
                self._run.add(shape)
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                out = run()
            finally:
                graph.capture_end()
        now.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
