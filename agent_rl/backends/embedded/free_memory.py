"""The memory that a device has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch


def free_memory(device: torch.device) -> float | None:
    """Return the bytes that a device has left; None if it doesn't say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(_available(), default=None)


def _available(root: Path = Path("/")) -> Iterator[float]:
    """Yield what Linux has left, and each control group that this process is in."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        yield 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = root / "sys/fs/cgroup" / next(line for line in lines if line.startswith("0::"))[3:].strip("/")
        for group in (own, *own.parents):
            if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
                yield float(int(most) - used)
