"""The limits of one call: set by each process on itself before it becomes the program."""

from __future__ import annotations

import resource
from collections.abc import Mapping

_RESOURCES = {
    "memory": resource.RLIMIT_AS,
    "cpu_seconds": resource.RLIMIT_CPU,
    "file_size": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
}
"""The kernel's name for each; what comes from this process inherits them."""


def lower(limits: Mapping[str, int]) -> None:
    """Lower this process's limits for good, none below what was there."""
    for name, value in limits.items():
        number = _RESOURCES[name]
        there = resource.getrlimit(number)[1]
        spare = 1 if number == resource.RLIMIT_CPU else 0  # so that SIGXCPU says why, before SIGKILL
        hard = value + spare if there == resource.RLIM_INFINITY else min(value + spare, there)
        resource.setrlimit(number, (min(value, hard), hard))
