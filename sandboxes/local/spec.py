"""What a sandbox is to be: the message from the host to the zygote."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spec:
    """One sandbox. The limits are those of `base.Limits`; sizes are bytes."""

    slot: int
    """Its number, which no other sandbox of the zygote has had."""
    memory: int
    processes: int
    cpus: float
    disk: int
    files: int
    lifetime: float
    """Seconds."""
    read_only: tuple[str, ...] = ()
    """Absolute paths that it can read, in addition to the system's. The zygote fills in this and what follows."""
    hidden: tuple[str, ...] = ()
    """Folders below them that it can't."""
    cpu_quota: bool = False
    """Whether a cgroup limits the processor time."""
    packages: str = ""
    """The folder of installed packages that it can read; none if empty."""
    home: str = "/work"
    visible: tuple[str, ...] = ()
    """Where there is no mount namespace: what of the system and of `read_only` it can read."""
