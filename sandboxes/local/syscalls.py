"""System calls that Python has no functions for, by ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# PyDLL keeps the interpreter's lock, which the child of a bare clone has then, too
_libc = ctypes.PyDLL(None, use_errno=True)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_CAP_AMBIENT = 1, 24, 47
_SIGCHLD = 17
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_X86 = platform.machine() == "x86_64"
_CLONE, _PIVOT_ROOT = (56, 155) if _X86 else (220, 41)
_MOUNT_SETATTR = 442
_LINUX_CAPABILITY_VERSION_3 = 0x20080522


def check(result: int, what: str) -> int:
    """Return what a system call returned.

    Raises:
        OSError: if it failed, with what it was to do.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call by its number; negative if it failed."""
    return int(
        _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    )


def prctl(option: int, *arguments: int) -> int:
    """Change something about this process."""
    padded = (*arguments, 0, 0, 0, 0)[:4]
    return check(_libc.prctl(option, *(ctypes.c_ulong(a) for a in padded)), f"prctl {option}")


def clone(flags: int) -> int:
    """Fork into new namespaces; return 0 in the child."""
    ctypes.pythonapi.PyOS_BeforeFork()  # os.fork does the same: since Python 3.13, locks have to be held for the child
    pid = syscall(_CLONE, flags | _SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return check(pid, "a process in new namespaces")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    check(_libc.unshare(flags), f"unshare {flags:#x}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    check(result, f"mount {kind or source or ''} at {target}")


def bind(source: str, target: str) -> None:
    """Bind `source` to `target` with all mounts below: read-only, no devices, no set-user-id."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    result = syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, len(attributes))
    check(result, f"mount_setattr {target}")


def pivot_root() -> None:
    """Make the current folder the root, and let go of the old one."""
    check(syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def set_hostname(name: str) -> None:
    """Name this UTS namespace."""
    check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def drop_capabilities() -> None:
    """Give up every capability, for good."""
    for number in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break
    _libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)  # all of them
    none = bytes(24)
    check(_libc.capset(struct.pack("Ii", _LINUX_CAPABILITY_VERSION_3, 0), none), "capset")
