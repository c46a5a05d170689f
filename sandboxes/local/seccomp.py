"""The system calls that code in a sandbox may make.

It is a list of what is refused, with a ceiling, rather than of what is allowed. Each call below is one of those that no
capability check stops, or that has let code out of namespaces before: tracing, keys, namespaces, mounts, modules, BPF,
performance counters, io_uring, userfaultfd, handles, clocks, memory policies. Nothing is lost by a call that is missing
here and asks for a capability, as there are none. Calls newer than `CEILING` don't exist: unknown ones are
denied. An allow-list of the some 350 calls that programs do make would differ in little but its length.

Sockets are of families that a network namespace bounds. AF_VSOCK is not (it reaches the hypervisor), AF_NETLINK, AF_ALG
and AF_PACKET are doors into the kernel. Of another architecture's calls (i386, x32) none is allowed.

Landlock guards what is in files, not their metadata, and a filter sees no paths. So where there is nothing but
Landlock, code can change no extended attributes, not even its own files'; and where it is a user whose files are in
sight, no owners, modes and times either. For owners and attributes it gets the usual error: programs know of users
without rights and of file systems without attributes. For modes and times the answer is a lie, as under fakeroot or on
FAT: the call succeeds and does nothing. With an error, `git init`, `tar`, `cp -p` and `shutil.copy` would stop. They go
on, and what is lost is what they asked for: a file is executable only if it was made so, its time is that of the last
write, and only its user can access a file in a sandbox, whatever its mode.

Another such lie is told everywhere: what makes the host write its disks out, or flush them, succeeds and does nothing,
as under eatmydata. Nobody wants the files of a sandbox back after the machine has crashed; and code could do it as
often as it likes, with a program of /usr. So do advices on files and memory (`posix_fadvise`, `madvise`), which could
throw files of the host out of the machine's memory. So does having a socket linger: closing it would keep its closer in
the kernel, and that can be a thread of the kernel's own. So do the times that a closed connection waits, and another
limit of cores: that of `jail.forbid_cores` stays.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping

from .. import syscall_arguments as arguments
from . import bpf
from .bpf import LIE, Rule, has_any, is_given, is_none_of, is_one_of
from .syscalls import check, prctl, syscall

CEILING = 462
"""mseal, of Linux 6.10: the newest that is allowed."""

# name: its number on x86_64, and on aarch64; None: there is none
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238)},
    # how others are scheduled: an agent that gets no processor time ends nothing
    **{"sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
    **{"sched_setaffinity": (203, 122), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    # the kernel's keys, which no namespace of ours bounds
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # mounts and namespaces
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97)},
    **{"setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"statmount": (457, 457), "listmount": (458, 458)},
    **{"sethostname": (170, 161), "setdomainname": (171, 162), "swapon": (167, 224), "swapoff": (168, 225)},
    # code in the kernel, and parts of it with a history
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105)},
    **{"finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104)},
    **{"kexec_file_load": (320, 294)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "uselib": (134, None)},
    **{"_sysctl": (156, None), "ustat": (136, None), "sysfs": (139, None), "modify_ldt": (154, None)},
    **{"personality": (135, 92), "memfd_secret": (447, 447), "lsm_set_self_attr": (460, 460)},
    # files by handle, past every folder's permissions
    **{"open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264)},
    **{"quotactl": (179, 60), "quotactl_fd": (443, 443)},
    # counts of the whole host, or of a user outside: of events, and of watchers of files
    **{"io_setup": (206, 0), "inotify_init": (253, None), "inotify_init1": (294, 26)},
    # the machine
    **{"reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171)},
    **{"clock_adjtime": (305, 266), "acct": (163, 89), "iopl": (172, None), "ioperm": (173, None)},
    **{"syslog": (103, 116), "vhangup": (153, 58)},
    **{"mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450)},
}
DENIED_WITHOUT_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    # what System V and POSIX queues share with the host, and what reaches processes of the same user
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193)},
    **{"semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188)},
    **{"msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181)},
}
HIDDEN: dict[str, tuple[int | None, int | None]] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Calls whose flags are not in sight of a filter: as if there were none, for which programs have other calls."""
LANDLOCK: dict[str, tuple[int | None, int | None]] = {"landlock_create_ruleset": (444, 444)}
"""Rules of code's own: the kernel holds them in memory that only a cgroup counts. As if there were none; but not where
the agent confines each process by it."""
SYNCS: dict[str, tuple[int | None, int | None]] = {
    **{"sync": (162, 81), "syncfs": (306, 267), "fsync": (74, 82), "fdatasync": (75, 83)},
    **{"sync_file_range": (277, 84)},
}
ADVICE: dict[str, tuple[int | None, int | None]] = {"fadvise64": (221, 223)}
"""Of a file in sight, it would drop what the machine keeps in memory of it, for all others."""
ATTRIBUTES: dict[str, tuple[int | None, int | None]] = {  # setxattrat and removexattrat are above the ceiling
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
}
OWNERS: dict[str, tuple[int | None, int | None]] = {
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54)},
}
MODES_AND_TIMES: dict[str, tuple[int | None, int | None]] = {
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
}
_SECCOMP = (317, 277)
CHECKED: dict[str, tuple[int | None, int | None]] = {
    **{"clone": (56, 220), "ioctl": (16, 29), "socket": (41, 198), "socketpair": (53, 199), "fcntl": (72, 25)},
    **{"prctl": (157, 167), "prlimit64": (302, 261), "setrlimit": (160, 164), "setsockopt": (54, 208)},
    **{"msync": (26, 227), "open": (2, None), "openat": (257, 56), "pwritev2": (328, 287)},
    **{"madvise": (28, 233), "seccomp": _SECCOMP, "mmap": (9, 222), "memfd_create": (319, 279), "semget": (64, 190)},
}
"""Calls whose arguments count; the tables below say how."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the tables, and the kernel's AUDIT_ARCH."""

_F_SETFL, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 4, 1024, 1026, 1031
"""Leases block who opens a file outside; notices tell of folders in sight; pages of pipes are counted by user."""
_SECCOMP_SETS = (0, 1)
"""SECCOMP_SET_MODE_STRICT and FILTER: see `SO_ATTACH`."""
_ON_FILES = (0x40086602, 0x401C5820, 0x40087602, 0x40806685, 0x800C6613)
"""FS_IOC_SETFLAGS, FSSETXATTR, SETVERSION, ENABLE_VERITY and SET_ENCRYPTION_POLICY: an open for reading is enough."""
_O_DSYNC, _RWF_SYNCS = 0x1000, 6
_O_DIRECT = getattr(os, "O_DIRECT", 0)
"""Reads what the machine has in its memory from its disk instead, as fast as that can."""


def _flagged(*types: int) -> tuple[int, ...]:
    """Return types of sockets as calls give them: without and with flags."""
    return tuple(type_ | flags for type_ in types for flags in (0, 0x800, 0x80000, arguments.SOCKET_FLAGS))


REFUSED: dict[str, tuple[Rule, ...]] = {
    "clone": (Rule(errno.EPERM, has_any(0, arguments.NEW_NAMESPACES)),),
    "ioctl": (Rule(errno.EPERM, is_one_of(1, *arguments.IOCTLS)),),
    "socket": (
        Rule(errno.EPROTONOSUPPORT, is_none_of(2, *arguments.PROTOCOLS)),
        Rule(errno.EAFNOSUPPORT, is_none_of(0, *arguments.FAMILIES)),
        Rule(errno.EPERM, is_none_of(0, arguments.AF_UNIX), is_one_of(1, *_flagged(arguments.RAW))),
        Rule(
            errno.EPROTONOSUPPORT,
            is_none_of(0, arguments.AF_UNIX),
            is_none_of(1, *_flagged(arguments.STREAM, arguments.DATAGRAM)),
        ),
        *(
            Rule(errno.ESOCKTNOSUPPORT, is_one_of(0, family), is_one_of(1, *_flagged(type_)), is_none_of(2, *protocols))
            for (family, type_), protocols in arguments.SOCKETS.items()
        ),
    ),
    "socketpair": (Rule(errno.EAFNOSUPPORT, is_none_of(0, arguments.AF_UNIX)),),
    "fcntl": (
        Rule(errno.EPERM, is_one_of(1, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ)),
        Rule(errno.EINVAL, is_one_of(1, _F_SETFL), has_any(2, _O_DIRECT)),
    ),
    "open": (Rule(errno.EINVAL, has_any(1, _O_DIRECT)),),
    "openat": (Rule(errno.EINVAL, has_any(2, _O_DIRECT)),),
    "prctl": (Rule(errno.EINVAL, is_one_of(0, *arguments.PRCTLS)),),
    "mmap": (Rule(errno.ENOMEM, has_any(3, arguments.MAP_HUGETLB)),),
    "memfd_create": (Rule(errno.ENOMEM, has_any(1, arguments.MFD_HUGETLB)),),
    "semget": (Rule(errno.ENOSPC, has_any(1, arguments.MANY_SEMAPHORES)),),
    "seccomp": (Rule(errno.EINVAL, is_one_of(0, *_SECCOMP_SETS)),),
    "setsockopt": (Rule(errno.EPERM, is_one_of(1, arguments.SOL_SOCKET), is_one_of(2, *arguments.SO_ATTACH)),),
    "prlimit64": (Rule(errno.EPERM, is_none_of(0, 0)),),  # its own limits only
}
REFUSED_WITHOUT_NAMESPACES: dict[str, tuple[Rule, ...]] = {
    "ioctl": (Rule(errno.EPERM, is_one_of(1, *_ON_FILES)),),
    "socket": (Rule(errno.EAFNOSUPPORT),),
    # files whose every write goes to the disk, and such writes
    "open": (Rule(errno.EINVAL, has_any(1, _O_DSYNC)),),
    "openat": (Rule(errno.EINVAL, has_any(2, _O_DSYNC)),),
    "pwritev2": (Rule(errno.EOPNOTSUPP, has_any(5, _RWF_SYNCS)),),
}
LIES: dict[str, tuple[Rule, ...]] = {
    "setsockopt": (
        Rule(LIE, is_one_of(1, arguments.SOL_SOCKET), is_one_of(2, arguments.SO_LINGER, *arguments.SO_BUFFERS)),
        Rule(LIE, is_one_of(1, arguments.SOL_TCP), is_one_of(2, *arguments.TCP_WAITS)),
    ),
    "madvise": (Rule(LIE, is_one_of(2, *arguments.MADVICE)),),
    "msync": (Rule(LIE, has_any(2, arguments.MS_SYNC)),),
    "setrlimit": (Rule(LIE, is_one_of(0, arguments.RLIMIT_CORE)),),
    "prlimit64": (Rule(LIE, is_one_of(1, arguments.RLIMIT_CORE), is_given(2)),),  # a new limit; asking for it is none
}


def supported() -> bool:
    """Whether there is a table for this machine."""
    return platform.machine() in _ARCHITECTURES


def program(*, namespaces: bool, shares_user: bool = False) -> bytes:
    """Return the filter as the kernel takes it.

    Args:
        namespaces: whether the sandbox has its own network and IPC; without, there are no sockets but pairs.
        shares_user: whether code runs as a user who has files outside.
    """
    column, arch = _ARCHITECTURES[platform.machine()]
    whole = [(DENIED, errno.EPERM), (HIDDEN, errno.ENOSYS), (SYNCS, LIE), (ADVICE, LIE)]
    tables: list[Mapping[str, tuple[Rule, ...]]] = [REFUSED, LIES]
    if namespaces:
        whole += [(LANDLOCK, errno.ENOSYS)]
    else:
        whole += [(DENIED_WITHOUT_NAMESPACES, errno.EPERM), (ATTRIBUTES, errno.EOPNOTSUPP)]
        tables += [REFUSED_WITHOUT_NAMESPACES]
    if shares_user:
        whole += [(OWNERS, errno.EPERM), (MODES_AND_TIMES, LIE)]
    filter_ = bpf.begin(arch, CEILING, errno.ENOSYS)
    for calls, code in whole:
        for numbers in calls.values():
            filter_ += bpf.answer(numbers[column], code)
    for name, numbers in CHECKED.items():
        rules = [rule for table in tables for rule in table.get(name, ())]
        filter_ += bpf.check(numbers[column], rules)
    return bpf.packed([*filter_, bpf.ALLOW])


def install(filter_: bytes) -> None:
    """Put this process, and all that come from it, under a filter for good."""
    code = ctypes.create_string_buffer(filter_)
    header = struct.pack("HxxxxxxQ", len(filter_) // 8, ctypes.addressof(code))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    number = _SECCOMP[_ARCHITECTURES[platform.machine()][0]]
    check(syscall(number, 1, 0, header), "seccomp")  # SECCOMP_SET_MODE_FILTER
