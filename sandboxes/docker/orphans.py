"""Containers whose trainer is gone: how they are told from others, and their removal."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.docker.engine import Engine

OWNER, PROCESS, EXPIRES = "agent-rl.owner", "agent-rl.process", "agent-rl.expires"
GRACE = 60.0
"""Seconds after a container's lifetime in which it may still be on its way out."""


def labels(owner: str, lifetime: float) -> dict[str, str]:
    """Return the labels of a container that this process starts now."""
    return {OWNER: owner, PROCESS: identity(os.getpid()), EXPIRES: f"{time.time() + lifetime + GRACE:.0f}"}


def identity(pid: int) -> str:
    """Return what tells a process from every other one, also on other machines and at other times.

    Raises:
        OSError: if there is no such process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}/{pid}/{started}"


def collect(engine: Engine) -> list[str]:
    """Remove the containers whose process has ended, or whose lifetime has; return their ids.

    Raises:
        SandboxError: if the engine can't be reached.
    """
    gone = [container for container, about in engine.labelled(PROCESS).items() if is_orphan(about)]
    for container in gone:
        with contextlib.suppress(SandboxError):  # others collect, too
            engine.remove(container)
    return gone


def is_orphan(about: dict[str, str]) -> bool:
    """Whether labels say that nobody uses a container; of a process elsewhere only its lifetime is known."""
    if time.time() > float(about[EXPIRES]):
        return True
    here, _, _ = identity(os.getpid()).rsplit("/", 2)
    there, pid, _ = about[PROCESS].rsplit("/", 2)
    if there != here:
        return False
    try:
        return identity(int(pid)) != about[PROCESS]
    except OSError:
        return True
