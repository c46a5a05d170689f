"""A container: its limits, the stream to its agent, and its labels."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.process_tree import started
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.calls import WORK
from agent_rl.sandboxes.client.remote import ENTRY
from agent_rl.sandboxes.docker.engine import Engine
from agent_rl.sandboxes.docker.seccomp import seccomp_profile
from agent_rl.sandboxes.syscall_arguments import CONNECTIONS

OVERHEAD = 32 * 1024 * 1024
"""Bytes of memory that the agent and the container's own files get on top of what the code may use."""
START_DATA = 160 * 1024 * 1024
"""The least limit of data: it holds for runc, too, which sets up seccomp under it. With 80 MiB that fails for the most
part, with 96 now and then."""
AGENT_PROCESSES = 4
"""The agent and the Python worker, and some to spare for reading and writing files."""

ARGV = ["python3", "-I", "-S", "-B", "-c", ENTRY]


def confinement(limits: Limits, user: int) -> Mapping[str, object]:
    """Return the host configuration of a container, as Docker's API names things.

    Args:
        limits: what the code in it may use.
        user: the uid and gid that everything in it has.
    """
    memory = limits.memory + 3 * limits.disk + OVERHEAD  # what is written is memory, too
    # data: so that a program that wants too much gets an error, and is not killed; sparse files have no size on a tmpfs
    ulimits = {**_ULIMITS, "data": max(limits.memory, START_DATA), "fsize": limits.disk}
    own = f"rw,nosuid,nodev,uid={user},gid={user},nr_inodes={limits.files},size={limits.disk}"
    return {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={seccomp_profile()}"],
        "Memory": memory,
        "MemorySwap": memory,  # no swap
        "PidsLimit": limits.processes + AGENT_PROCESSES,
        "NanoCpus": int(limits.cpus * 1e9),
        "Tmpfs": {
            WORK: f"{own},exec,mode=755",  # its other users may read there
            "/tmp": f"{own},exec,mode=1777",
            "/dev/shm": f"{own},noexec,mode=1777",
        },
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits.items()],
        "LogConfig": {"Type": "none"},  # else every byte would be written to the host's disk
        "IpcMode": "private",
        "Sysctls": {f"net.ipv4.{name}": value for name, value in CONNECTIONS.items()},
        "CgroupnsMode": "private",
        "MaskedPaths": _MASKED,
        "ReadonlyPaths": _READ_ONLY,
        "OomScoreAdj": 500,
        "AutoRemove": True,
    }


_MASKED = ["/sys", "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/scsi"]
_MASKED += ["/proc/timer_list", "/proc/timer_stats"]
"""Docker's own list, but all of /sys: it describes the machine, and nothing here needs that."""
_READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
_ULIMITS = {"core": 1, "memlock": 0, "msgqueue": 0, "sigpending": 256, "nofile": 1024}


def any_user() -> int:
    """Draw a uid for a container: one that others share would share the kernel's counts of pipes and watches, too."""
    return _USERS + secrets.randbelow(_USERS)


def uid_of(first: int, number: int) -> int:
    """Return the uid of one of a container's users; the first one's number is 0."""
    return first + number * _USERS


_USERS = 2**20
"""The distance of the uids of a container's users; all are above those that hosts give out."""
MAX_USERS = 4
"""Beside the first; each one's agent takes 16 MB and a process of the sandbox's limits."""


# The stream of an attached container

_HEADER = struct.Struct(">BxxxL")
_STDERR = 2
_KEPT = 2000


class Demultiplexer:
    """Takes stdout out of what arrives; the last of stderr is kept as the agent's complaint."""

    def __init__(self) -> None:
        self.complaint = ""
        self._buffer = bytearray()
        self._kind, self._left = 0, 0

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those of stdout."""
        self._buffer += data
        out = []
        while self._left or len(self._buffer) >= _HEADER.size:
            if not self._left:
                self._kind, self._left = _HEADER.unpack_from(self._buffer)
                del self._buffer[: _HEADER.size]
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            self._left -= len(piece)
            if self._kind == _STDERR:
                self.complaint = (self.complaint + piece.decode(errors="backslashreplace"))[-_KEPT:]
            else:
                out.append(piece)
            if not self._buffer:
                break
        return b"".join(out)


# Containers whose trainer is gone

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
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}/{pid}/{started(pid)}"


def collect(engine: Engine) -> list[str]:
    """Remove containers of ended processes and of ended lifetimes; return their ids.

    Raises:
        SandboxError: if the engine can't be reached.
    """
    gone = [container for container, about in engine.labelled(PROCESS).items() if is_orphan(about)]
    for container in gone:
        with contextlib.suppress(SandboxError):  # others collect, too
            engine.remove(container)
    return gone


def is_orphan(about: dict[str, str]) -> bool:
    """Whether a container is unused by its labels; of another machine's, only the lifetime is known."""
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
