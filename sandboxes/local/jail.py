"""A jail: a process in its own namespaces, with a root file system of readable paths only."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import signal
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..syscall_arguments import CONNECTIONS
from . import homes, seccomp, syscalls
from .spec import Spec

UID = 1000
"""The user that code is, inside."""
NAMESPACES = syscalls.NEWUSER | syscalls.NEWPID | syscalls.NEWNS | syscalls.NEWNET | syscalls.NEWIPC | syscalls.NEWUTS
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/fonts", "/etc/ld.so.cache")
PACKAGES = "/packages"
"""Where the folder of installed packages is shown, wherever it lies on the host."""
HIDDEN = ("usr/lib/python3/dist-packages", "usr/local/lib/python3*/*-packages")
"""Installed packages are the host's business: agent_rl among them, with the answers to its environments' tasks."""
DEVICES = ("null", "zero", "full", "random", "urandom")
DESCRIPTORS = 512
"""Of a process. With them all under way over sockets, the trainer, where it is the same user, can still send its own:
the kernel counts them by user, and refuses the next to who has a lower limit than there are (1024, at least)."""
TERMINALS = 32
"""Pseudo-terminals at a time: the host has a number of its own in reserve, the others share 3,072."""
SPARE = 8
"""Processes that the agent can have when the code has used up its own."""
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 1, 64
_ROOT = "/tmp"
"""Where the new root is put together: any folder would do, as no other process sees it."""
_QUIET = syscalls.MS_NOSUID | syscalls.MS_NODEV
_FILES = {
    "etc/passwd": f"root:x:0:0::/:/bin/sh\nsandbox:x:{UID}:{UID}::/work:/bin/sh\n",
    "etc/group": f"root:x:0:\nsandbox:x:{UID}:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Something of the host's that a jail will show at a path, mostly its own."""

    path: str
    fd: int

    @classmethod
    def open(cls, path: str, shown: str = "") -> _Source:
        """Open it, while this is still the user who may see it: a mount can be made from a descriptor."""
        return cls(shown or path, os.open(path, os.O_PATH))

    @property
    def magic(self) -> str:
        """A path to the opened file that needs no access to its folders."""
        return f"/proc/self/fd/{self.fd}"

    def make_target(self, root: Path) -> str:
        """Make the empty folder or file that it will be mounted on."""
        target = root / self.path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISDIR(os.fstat(self.fd).st_mode):
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        return str(target)


def map_ids(pid: int, uid: int, gid: int) -> None:
    """Say which user of the host's the code in a jail is.

    Raises:
        OSError: if this process may not.
    """
    folder = Path(f"/proc/{pid}")
    if os.geteuid() != 0:
        (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(f"{UID} {uid} 1\n")
    (folder / "gid_map").write_text(f"{UID} {gid} 1\n")


def enter(spec: Spec) -> None:
    """Make a jail around this process, which `syscalls.clone` put into `NAMESPACES` and `map_ids` gave a user.

    Raises:
        OSError: if the kernel refuses a step.
    """
    _bound_connections()
    syscalls.unshare(syscalls.NEWCGROUP)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    sources = [_Source.open(path) for path in _existing((*SYSTEM, *spec.read_only))]
    sources += [_Source.open(path, PACKAGES) for path in [spec.packages] if path]
    devices = [_Source.open(f"/dev/{name}") for name in DEVICES]
    links = {path: str(Path(path).readlink()) for path in SYSTEM if Path(path).is_symlink()}
    if Path("/proc/self/setgroups").read_text().strip() == "allow":
        os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    _build_root(spec, sources, devices, links)
    syscalls.pivot_root()
    syscalls.mount(None, "/", None, syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | _QUIET)
    syscalls.set_hostname("sandbox")
    _raise_loopback()
    for source in (*sources, *devices):
        os.close(source.fd)
    syscalls.drop_capabilities()
    limit(spec, processes=spec.processes + SPARE)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the last change of user, which clears it
    if not spec.cpu_quota:
        pin(spec)
    seccomp.install(seccomp.program(namespaces=True))


def confine(spec: Spec) -> None:
    """Limit this process before it runs foreign code."""
    limit(spec, processes=spec.processes, memory=spec.memory)


def forbid_cores() -> None:
    """Keep this process, and all that come from it, from dumping core; `seccomp` keeps code from changing that.

    A limit of 0 would not stop a host whose cores are piped into a program: the kernel runs that, as root, whatever the
    limit, but for one of 1 (`do_coredump`). Where cores go to files, so small a one is not written either.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def pin(spec: Spec) -> None:
    """Bind this process to as many processors as it may use: the limit where no cgroup is."""
    there = sorted(os.sched_getaffinity(0))
    count = min(len(there), max(1, math.ceil(spec.cpus)))
    os.sched_setaffinity(0, {there[(spec.slot * count + i) % len(there)] for i in range(count)})


def limit(spec: Spec, *, processes: int | None = None, memory: int | None = None) -> None:
    """Set what one process of the sandbox may use."""
    limits = {
        resource.RLIMIT_NOFILE: DESCRIPTORS,
        resource.RLIMIT_FSIZE: spec.disk,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        **({} if processes is None else {resource.RLIMIT_NPROC: processes}),
        **({} if memory is None else {resource.RLIMIT_AS: memory}),
    }
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _existing(paths: Sequence[str]) -> list[str]:
    """Return the existing paths, without those below another one."""
    there = [path for path in dict.fromkeys(paths) if Path(path).exists()]
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]


def _build_root(spec: Spec, sources: Sequence[_Source], devices: Sequence[_Source], links: Mapping[str, str]) -> None:
    syscalls.mount("tmpfs", _ROOT, "tmpfs", _QUIET, "size=1m,mode=755,nr_inodes=1024")
    root = Path(_ROOT)
    os.chdir(root)
    for folder in ("dev/shm", "dev/pts", "proc", "etc", "tmp", "work", "empty"):
        (root / folder).mkdir(parents=True)
    homes.name_python(root)
    for path, link in links.items():
        (root / path[1:]).symlink_to(link)
    for source in sources:
        if source.path not in links:
            syscalls.bind(source.magic, source.make_target(root))
    for pattern in (*HIDDEN, *(hidden[1:] for hidden in spec.hidden)):
        for packages in root.glob(pattern):
            syscalls.bind(str(root / "empty"), str(packages))
    for source in devices:
        syscalls.mount(source.magic, source.make_target(root), None, syscalls.MS_BIND)
    for name, link in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (root / "dev" / name).symlink_to(f"/proc/self/{link}")
    for file, text in _FILES.items():
        (root / file).write_text(text)
    terminals = f"newinstance,ptmxmode=666,mode=600,max={TERMINALS}"
    syscalls.mount("devpts", str(root / "dev/pts"), "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, terminals)
    (root / "dev/ptmx").symlink_to("pts/ptmx")
    syscalls.mount("proc", str(root / "proc"), "proc", _QUIET | syscalls.MS_NOEXEC, "subset=pid")
    for folder, size, files, flags in (
        ("work", spec.disk, spec.files, _QUIET),
        ("tmp", spec.disk, spec.files, _QUIET),
        ("dev/shm", spec.disk // 4, 256, _QUIET | syscalls.MS_NOEXEC),
    ):
        options = f"size={size},nr_inodes={files + 1},mode=700"
        syscalls.mount("tmpfs", str(root / folder), "tmpfs", flags, options)


def _bound_connections() -> None:
    """Bound what a connection holds: all of the machine share TCP's memory, which no cgroup of version 1 counts."""
    for name, value in CONNECTIONS.items():
        with contextlib.suppress(OSError):  # in a container, its file may be read-only
            Path(f"/proc/sys/net/ipv4/{name}").write_text(value)  # of this process's network


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
