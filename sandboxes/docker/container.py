"""What one of our containers is allowed: its configuration, and the entry point that takes the agent in."""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path

from agent_rl.sandboxes import inside
from agent_rl.sandboxes.base import WORK, Limits
from agent_rl.sandboxes.docker.profile import seccomp_profile

OVERHEAD = 48 * 1024 * 1024
"""Bytes of memory that the agent and the container's own files get on top of what the code may use."""
AGENT_PROCESSES = 4
"""The agent and the Python worker, and some to spare for reading and writing files."""

ENTRY = """\
import importlib.util, json, os, signal, struct, sys

def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("the host is gone")
    return data

class Sent:
    def find_spec(self, name, path=None, target=None):
        if name in sources:
            return importlib.util.spec_from_loader(name, self, is_package="." not in name)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(sources[module.__name__], module.__name__, "exec"), module.__dict__)

home, lifetime, sources = json.loads(take(*struct.unpack(">I", take(4))))
sys.meta_path.append(Sent())
from inside.agent import Agent
requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)
agent = Agent(requests, replies, home=home, confine=lambda: None)
signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, lifetime)
agent.serve()
"""
"""Reads the agent's source from stdin, so that any image with a python3 will do, and ends when the lifetime is over."""

ARGV = ["python3", "-I", "-S", "-B", "-c", ENTRY]


def greeting(lifetime: float) -> bytes:
    """Return what `ENTRY` reads first: the agent's source, and for how long it shall live, in seconds."""
    files = Path(inside.__file__).parent.glob("*.py")
    sources = {f"inside.{file.stem}".removesuffix(".__init__"): file.read_text() for file in files}
    text = json.dumps((WORK, lifetime, sources)).encode()
    return struct.pack(">I", len(text)) + text


def confinement(limits: Limits, user: int) -> Mapping[str, object]:
    """Return the host configuration of a container, as Docker's API names things.

    Args:
        limits: what the code in it may use.
        user: the uid and gid that everything in it has.
    """
    memory = limits.memory + 2 * limits.disk + OVERHEAD  # what is written is memory, too
    private = f"rw,nosuid,nodev,uid={user},gid={user},mode=700,nr_inodes={limits.files}"
    shared = min(limits.memory // 2, 64 * 1024 * 1024)
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
            "/dev/shm": f"{private},noexec,size={shared}",
        },
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in _ULIMITS.items()],
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
