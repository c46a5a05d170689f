"""The part of a weight update that runs in vLLM's worker: weights are read from memory that the trainer shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

Place = tuple[str, str, Sequence[int], int]
"""Where a weight lies: its name, the name of its format, its shape and the offset of its first byte."""


class WeightReceiver:
    """An extension of vLLM's worker; `worker_extension_cls` names it."""

    model_runner: Any
    shared: SharedMemory | None = None

    def receive_weights(self, segment: str, places: Sequence[Place]) -> None:
        """Load all weights again, layer by layer: kernels keep them packed in forms of their own.

        Args:
            segment: the shared memory's name.
            places: what lies in it.
        """
        if self.shared is None:  # stays open: tensors that were loaded may still look at it
            self.shared = SharedMemory(segment)
        self.model_runner.reload_weights(weights_iterator=_read(self.shared, places))
        for layer in self.model_runner.get_model().modules():
            # on a CPU, a head that is tied to the embedding computes with a packed copy of it, which is not renewed
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)


def _read(shared: SharedMemory, places: Sequence[Place]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, form, shape, offset in places:
        flat = torch.frombuffer(shared.buf, dtype=getattr(torch, form), count=torch.Size(shape).numel(), offset=offset)
        yield name, flat.view(*shape)
