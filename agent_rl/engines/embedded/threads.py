"""How many threads torch computes with, and with what else that is the whole process's.

Two threads of OpenMP wait for each other some thousand times a second in a model of a million parameters. On a machine
with other work, one of them is always off its core. Four steps of `make train`'s model, at a load of 5 to 9 on two
cores: 90 s and 35 CPU-s on one thread, 155 s and 40 on two that wait asleep, 231 s and 191 on two that spin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import nn

ONE_THREAD = 10_000_000
"""Parameters below which a second thread wastes more than it gives: it made the products of a layer cost 1.36 times the
CPU time at a hidden size of 128 (0.7 M parameters), 1.22 at 256, 1.13 at 384 (about 10 M) and 1.12 at 576, with 64
tokens a step."""


def use_threads(model: nn.Module, wanted: int = 0, processes: int = 1) -> int:
    """Set torch's threads for a model and return their number.

    Args:
        model: what is computed.
        wanted: that number; 0 for one thread of a small model, and torch's own choice for a larger one.
        processes: how many processes share that choice.
    """
    small = sum(p.numel() for p in model.parameters()) < ONE_THREAD
    most = torch.get_num_threads()
    if processes > 1:
        most = min(most, max(1, (os.cpu_count() or 1) // processes))
    torch.set_num_threads(wanted or (1 if small else most))
    return torch.get_num_threads()


@contextmanager
def threads_restored() -> Iterator[None]:
    """Give the process back the number of threads that it had: it may be a user's notebook."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def torch_as_it_starts() -> Iterator[None]:
    """Compute with gradients, in float32 and on the CPU where nothing else is said, whatever a user's notebook has set.

    It gets back what it had, the number of threads too.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    plain = nullcontext() if device.type == "cpu" else torch.device("cpu")  # which slows every call down
    torch.set_default_dtype(torch.float32)
    try:
        with threads_restored(), plain, torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
