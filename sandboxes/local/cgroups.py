"""Cgroups: limits on all processes of a sandbox together, in a writable hierarchy.

Of version 2 there is one hierarchy; of version 1 one for each controller, and the same folder is made in each. Folders
carry the process id and the start time of the zygote that made them, so that the next one can tell what is left over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = "agent-rl"
PERIOD = 100_000
"""Microseconds over which processor time is shared out."""
_CONTROLLERS = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder in which cgroups can be made."""

    path: Path
    controllers: tuple[str, ...]
    version: int


def find(mounts: str | None = None, own: str | None = None) -> list[Hierarchy]:
    """Return the hierarchies that a process of this user can make cgroups in, and move itself into them.

    Args:
        mounts: what /proc/self/mounts says; read if left out.
        own: what /proc/self/cgroup says.
    """
    mounted = [line.split() for line in (mounts or Path("/proc/self/mounts").read_text()).splitlines()]
    lines = [line.split(":", 2) for line in (own or Path("/proc/self/cgroup").read_text()).splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    found: list[Hierarchy] = []
    for _, folder, kind, options, *_ in mounted:
        if kind == "cgroup":
            names = tuple(name for name in _CONTROLLERS if name in options.split(",") and name in paths)
            candidates = [Path(folder + paths[names[0]]), Path(folder)] if names else []
            found += _first_usable([Hierarchy(path, names, 1) for path in candidates])
        elif kind == "cgroup2":
            here = Path(folder + paths.get("", "/"))
            # a cgroup with processes can't have limited children, so it is mostly one further up
            ancestors = [here, *(path for path in here.parents if path.is_relative_to(folder))]
            found += _first_usable([Hierarchy(path, _enabled(path), 2) for path in ancestors])
    return found


def _enabled(path: Path) -> tuple[str, ...]:
    """Return which controllers the children of a version 2 cgroup have, or can be given."""
    try:
        there = (path / "cgroup.controllers").read_text().split()
    except OSError:
        return ()
    return tuple(name for name in _CONTROLLERS if name in there)


def _first_usable(candidates: Sequence[Hierarchy]) -> list[Hierarchy]:
    for hierarchy in candidates:
        if hierarchy.controllers and _usable(hierarchy):
            return [hierarchy]
    return []


def _usable(hierarchy: Hierarchy) -> bool:
    """Whether a cgroup can be made here that a process can be moved into."""
    probe = hierarchy.path / ROOT / f"probe-{os.getpid()}"
    try:
        probe.mkdir(parents=True)
        if hierarchy.version == 2:
            for folder in (hierarchy.path, probe.parent):
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in hierarchy.controllers))
        return _runs_in(probe)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()


def _runs_in(folder: Path) -> bool:
    """Whether a process can be moved into a cgroup."""
    pid = os.fork()
    if pid == 0:
        try:
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


_MAY_LACK = ("memory.swap.max", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
"""What a kernel may have no account of: swap; and, in version 1, the buffers of TCP, which count apart."""


def make(hierarchies: Sequence[Hierarchy], name: str, *, memory: int, processes: int, cpus: float) -> list[Path]:
    """Make the cgroup of a sandbox; return its folders.

    Raises:
        OSError: if that can't be done after all; nothing is left then.
    """
    quota = max(1000, int(cpus * PERIOD))
    settings: Mapping[tuple[str, int], Mapping[str, str]] = {
        ("memory", 1): {"memory.limit_in_bytes": f"{memory}"} | dict.fromkeys(_MAY_LACK[1:], f"{memory}"),
        ("pids", 1): {"pids.max": f"{processes}"},
        ("cpu", 1): {"cpu.cfs_period_us": f"{PERIOD}", "cpu.cfs_quota_us": f"{quota}"},
        ("memory", 2): {"memory.max": f"{memory}", "memory.swap.max": "0"},
        ("pids", 2): {"pids.max": f"{processes}"},
        ("cpu", 2): {"cpu.max": f"{quota} {PERIOD}"},
    }
    made: list[Path] = []
    try:
        for hierarchy in hierarchies:
            folder = hierarchy.path / ROOT / name
            folder.mkdir(parents=True)
            made.append(folder)
            for controller in hierarchy.controllers:
                for file, value in settings[controller, hierarchy.version].items():
                    if file not in _MAY_LACK or (folder / file).exists():
                        (folder / file).write_text(value)
    except OSError:
        remove(made)
        raise
    return made


def join(folders: Sequence[Path], pid: int) -> None:
    """Move a process into a cgroup."""
    for folder in folders:
        (folder / "cgroup.procs").write_text(str(pid))


def kill(folders: Sequence[Path]) -> None:
    """Kill every process in a cgroup: at once where the kernel can (version 2, Linux 5.14), else one by one."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if (folder / "cgroup.kill").exists():
                (folder / "cgroup.kill").write_text("1")
                continue
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def events(folders: Sequence[Path]) -> dict[str, int]:
    """Return what a cgroup has counted, by the names of `SandboxLoss.evidence`, where the kernel counts it."""
    found: dict[str, int] = {}
    for folder in folders:
        for file, name, key in _COUNTS:
            with contextlib.suppress(OSError, ValueError):
                words = (folder / file).read_text().split()
                found[name] = found.get(name, 0) + int(words[words.index(key) + 1])
        with contextlib.suppress(OSError, ValueError):  # of version 1: not all kernels count in memory.failcnt
            most, limit = (int((folder / f"memory.{file}_in_bytes").read_text()) for file in ("max_usage", "limit"))
            found["limit_hits"] = found.get("limit_hits", 0) + (most > limit - _HUGE_PAGE)
    return found


_HUGE_PAGE = 2 * 1024 * 1024
"""Bytes: what is asked for at a time, at most, so that a limit may be hit as far below it."""
_COUNTS = (
    ("memory.events", "oom_kills", "oom_kill"),
    ("memory.events", "limit_hits", "oom"),  # an allocation was about to fail at this cgroup's own limit
    ("memory.oom_control", "oom_kills", "oom_kill"),
    ("pids.events", "forks_refused", "max"),
)
"""The files of cgroups of version 2 and 1: what is counted in each, after which word."""


def remove(folders: Sequence[Path]) -> list[Path]:
    """Remove a cgroup without processes; return the folders that are still busy."""
    busy = []
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            busy.append(folder)
    return busy


def collect(hierarchies: Sequence[Hierarchy], alive: Callable[[str], bool]) -> int:
    """Remove the cgroups of ended zygotes, and kill the processes in them; return their number.

    Args:
        hierarchies: where to look.
        alive: whether the zygote of that mark, the part of a cgroup's name before the dash, is still there.
    """
    count = 0
    for hierarchy in hierarchies:
        for folder in (hierarchy.path / ROOT).glob("*-*"):
            if alive(folder.name.rpartition("-")[0]):
                continue
            kill([folder])
            for _ in range(100):
                if not remove([folder]):
                    count += 1
                    break
                time.sleep(0.005)
    return count
