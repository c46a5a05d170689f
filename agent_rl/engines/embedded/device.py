"""Devices by their names in the settings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    import torch


def device_of(name: str) -> torch.device:
    """Return the device of a name: `cpu`, `cuda`, `cuda:N`, or `auto`, the first GPU if there is one, else the CPU.

    Raises:
        ConfigError: if this machine has no such device; it says which there are.
    """
    there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    chosen = {"auto": there[-1] if len(there) == 1 else there[1], "cuda": "cuda:0"}.get(name, name)
    if chosen not in there:
        why = "; mps has no float64, in which losses are summed" if name == "mps" else ""
        raise ConfigError(f"device={name}: this machine has auto, {', '.join(there)}{why}")
    if chosen != "cpu":  # for `Optimizer.backward`; cuBLAS reads it once, when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(chosen)
