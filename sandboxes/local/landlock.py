"""Landlock: a process without namespaces, limited to allowed files, connections and signals.

For where user namespaces are refused, as in a default container. There are two domains, one in the other: the agent's
bounds only what it can signal, so that `kill(-1)` kills its sandbox; the inner one, of each process that runs
foreign code, bounds files and sockets too, and can't reach the agent.

It guards what is in files, not what is said of them: code sees by `stat` which files exist. `seccomp` keeps it from
changing that.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import homes, seccomp, syscalls
from .jail import DEVICES, HIDDEN, SYSTEM, limit, pin
from .spec import Spec

SHARED_UID = 65534
"""The user that code is where root has no numbers of its own to give away."""
MIN_ABI = 6
"""Of Linux 6.12, the first that bounds signals and abstract sockets."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
_ALL_FILES = (1 << 16) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_ALL_NET, _ALL_SCOPES = 3, 3
_FIELD = re.compile(rb"^(PPid|Uid|Threads):\s+(\d+)", re.MULTILINE)


def abi() -> int:
    """Return the version of Landlock that the kernel has; 0 or less if none."""
    return syscalls.syscall(_CREATE_RULESET, None, 0, 1)


def enter(spec: Spec, uid: int | None) -> None:
    """Make this process the agent's: it can signal no process outside.

    Args:
        spec: the sandbox.
        uid: whom to become, which needs root's rights; None: stay who it is.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.setsid()
    os.umask(0o077)
    syscalls.drop_capabilities()
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
    if not spec.cpu_quota:
        pin(spec)
    seccomp.install(seccomp.program(namespaces=False, shares_user=uid in (None, SHARED_UID)))
    _restrict(_ruleset(0, 0), ())
    limit(spec)  # of processes, too, it would count all of the user's, who opens more sandboxes meanwhile


def confine(spec: Spec) -> None:
    """Shut this process in: it is about to run foreign code."""
    limit(spec, processes=_others() + spec.processes, memory=spec.memory)
    around = Path(spec.home).parent
    readable = (*spec.visible, str(around / homes.PYTHON))  # what replaces `python3` would be run in its place
    writable = (spec.home, str(around / homes.TMP), "/dev/null")
    rules = [*((path, _READ) for path in readable), *((path, _ALL_FILES & ~_NODES) for path in writable)]
    rules.append((str(Path(os.__file__).parent), _READ_DIR))  # an import lists the folder; packages may be hidden below
    _restrict(_ruleset(_ALL_FILES, _ALL_NET), rules)


_NODES = _MAKE_CHAR | _MAKE_BLOCK


def visible(spec: Spec) -> tuple[str, ...]:
    """Return the paths for the rules: all readable ones, without the hidden ones."""
    hidden = {str(path) for pattern in HIDDEN for path in Path("/").glob(pattern)} | set(spec.hidden)
    devices = [f"/dev/{name}" for name in DEVICES]
    paths = dict.fromkeys(os.path.realpath(path) for path in (*SYSTEM, *spec.read_only, *filter(None, [spec.packages])))
    return tuple(path for root in (*paths, *devices) for path in _around(root, hidden))


def _around(path: str, hidden: set[str]) -> Iterator[str]:
    """Return a path, or if something hidden is below it, all else that is."""
    if path in hidden or not Path(path).exists():
        return
    if not any(other.startswith(f"{path}/") for other in hidden):
        yield path
        return
    for child in sorted(Path(path).iterdir()):
        yield from _around(str(child), hidden)


def _others() -> int:
    """Return how many processes and threads this user has beside those below the agent, this one's parent."""
    own, agent = os.getuid(), os.getppid()
    parents, threads = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid in (own, 0):  # agents show as root's: nobody may trace them
                    found = {name: int(value) for name, value in _FIELD.findall((folder / "status").read_bytes())}
                    if found[b"Uid"] == own:
                        parents[int(folder.name)], threads[int(folder.name)] = found[b"PPid"], found[b"Threads"]
            except (OSError, KeyError):  # it has ended
                continue
    inside = {agent}
    while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= more
    return sum(count for pid, count in threads.items() if pid == agent or pid not in inside)


def _ruleset(files: int, net: int) -> int:
    attributes = struct.pack("QQQ", files, net, _ALL_SCOPES)
    return syscalls.check(syscalls.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")


def _restrict(ruleset: int, rules: Iterable[tuple[str, int]]) -> None:
    """Enter a domain with what is allowed in it, and close the ruleset."""
    for path, access in rules:
        try:
            fd = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _OF_A_FILE
        rule = struct.pack("<Qi", access, fd)
        syscalls.check(syscalls.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(fd)
    syscalls.check(syscalls.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
