"""Devices by their names in the settings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    import torch


def device_of(name: str) -> torch.device:
    """Return the device of a name: `cpu`, `cuda`, `cuda:N`, `mps`, or `auto`: the first GPU, Apple's, or else the CPU.

    Raises:
        ConfigError: if this machine has no such device; it says which there are.
    """
    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    there += ["mps"] if torch.backends.mps.is_available() else []
    chosen = {"auto": (*there, "cpu")[0], "cuda": "cuda:0"}.get(name, name)
    if chosen not in ("cpu", *there):
        raise ConfigError(f"device={name}: this machine has {', '.join(('cpu', *there))}; set one, or device=auto")
    if chosen.startswith("cuda"):  # for `Optimizer.backward`; cuBLAS reads it once, when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(chosen)


def float64_device(device: torch.device) -> torch.device:
    """Return where to compute in float64 what is on a device: `mps` has no such numbers, and leaves them to the CPU."""
    return torch.device("cpu") if device.type == "mps" else device
