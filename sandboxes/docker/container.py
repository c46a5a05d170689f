"""What one of our containers is allowed: its configuration, as Docker's API has it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from agent_rl.sandboxes.base import WORK, Limits
from agent_rl.sandboxes.docker.profile import seccomp_profile
from agent_rl.sandboxes.sent import ENTRY

OVERHEAD = 32 * 1024 * 1024
"""Bytes of memory that the agent and the container's own files get on top of what the code may use."""
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
    # data: so that a program that wants too much is told so, and not killed; sparse files have no size on a tmpfs
    ulimits = {**_ULIMITS, "data": limits.memory, "fsize": limits.disk}
    private = f"rw,nosuid,nodev,uid={user},gid={user},mode=700,nr_inodes={limits.files}"
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
            WORK: f"{private},exec,size={limits.disk}",
            "/tmp": f"{private},exec,size={limits.disk}",
            "/dev/shm": f"{private},noexec,size={limits.disk}",
        },
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits.items()],
        "LogConfig": {"Type": "none"},  # else every byte would be written to the host's disk
        "IpcMode": "private",
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
_ULIMITS = {"core": 0, "memlock": 0, "msgqueue": 0, "sigpending": 256, "nofile": 1024}


def any_user() -> int:
    """Draw a uid for a container: one that others share would share the kernel's counts of pipes and watches, too."""
    return 2**20 + secrets.randbelow(2**20)
