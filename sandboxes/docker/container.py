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
import json, os, signal, struct, sys, types

def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("the host is gone")
    return data

def build(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    module.__package__, module.__path__ = name.partition(".")[0], []
    exec(compile(source, name, "exec"), module.__dict__)
    setattr(sys.modules[module.__package__], name.partition(".")[2], module)
    return module

started = json.loads(take(struct.unpack(">I", take(4))[0]))
for name in started["order"]:
    module = build(name, started["sources"][name])
requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)
agent = module.Agent(requests, replies, home=started["home"], confine=lambda: None)
signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, started["lifetime"])
agent.serve()
"""
"""Reads the agent's source from stdin, so that any image with a python3 will do, and ends when the lifetime is over."""

ARGV = ["python3", "-I", "-S", "-B", "-c", ENTRY]
_ORDER = ("wire", "worker", "capture", "processes", "files", "agent")
"""The agent's modules, each after those that it imports."""


def greeting(lifetime: float) -> bytes:
    """Return what `ENTRY` reads first: the agent's source, and for how long it shall live, in seconds."""
    folder = Path(inside.__file__).parent
    sources = {"inside": ""} | {f"inside.{name}": (folder / f"{name}.py").read_text() for name in _ORDER}
    started = {"order": list(sources), "sources": sources, "home": WORK, "lifetime": lifetime}
    text = json.dumps(started).encode()
    return struct.pack(">I", len(text)) + text


def confinement(limits: Limits, user: int) -> Mapping[str, object]:
    """Return the host configuration of a container, as Docker's API names things.

    Args:
        limits: what the code in it may use.
        user: the uid and gid that everything in it has.
    """
    memory = limits.memory + 2 * limits.disk + OVERHEAD  # what is written is memory, too
    scratch = f"rw,nosuid,nodev,size={limits.disk},nr_inodes={limits.files},uid={user},gid={user}"
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
            WORK: f"{scratch},exec,mode=700",
            "/tmp": f"{scratch},exec,mode=1777",
            "/dev/shm": f"rw,nosuid,nodev,noexec,size={shared},nr_inodes={limits.files},uid={user},gid={user},mode=700",
        },
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in _ULIMITS.items()],
        "LogConfig": {"Type": "none"},  # else every byte would be written to the host's disk
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "OomScoreAdj": 500,
        "AutoRemove": True,
    }


_ULIMITS = {"core": 0, "memlock": 0, "msgqueue": 0, "sigpending": 256, "nofile": 1024}


def any_user() -> int:
    """Draw a uid for a container: one that others share would share the kernel's counts of pipes and watches, too."""
    return 2**20 + secrets.randbelow(2**20)
