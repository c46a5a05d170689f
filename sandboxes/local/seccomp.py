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
often as it likes, with a program of /usr. So does having a socket linger: closing it would keep its closer in the
kernel, and that can be a thread of the kernel's own. So does another limit of cores: that of `jail.forbid_cores` stays.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Sequence

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
SYNCS: dict[str, tuple[int | None, int | None]] = {
    **{"sync": (162, 81), "syncfs": (306, 267), "fsync": (74, 82), "fdatasync": (75, 83)},
    **{"sync_file_range": (277, 84)},
}
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
_CLONE, _CLONE3, _IOCTL, _PRLIMIT, _SETRLIMIT = (56, 220), (435, 435), (16, 29), (302, 261), (160, 164)
_SOCKET, _SOCKETPAIR, _SETSOCKOPT, _SECCOMP = (41, 198), (53, 199), (54, 208), (317, 277)
_FCNTL, _PRCTL, _MSYNC, _PWRITEV2 = (72, 25), (157, 167), (26, 227), (328, 287)
_OPENAT2 = (437, 437)
_OPENS: tuple[tuple[tuple[int | None, int | None], int], ...] = (((2, None), 1), ((257, 56), 2))
"""open and openat, and which argument has the flags."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the tables, and the kernel's AUDIT_ARCH."""

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_PROTOCOLS = (0, 1, 6, 17, 58)
"""Whatever is usual, ICMP, TCP, UDP, ICMPv6: to ask for another one makes the host load a module of its kernel."""
_SOL_SOCKET, _SO_LINGER = 1, 13
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 1024, 1026, 1031
"""Leases block who opens a file outside; notices tell of folders in sight; pages of pipes are counted by user."""
_PR_SCHED_CORE = 62
"""Keeps a core's other threads idle."""
_MS_SYNC, _O_DSYNC, _RWF_SYNCS = 4, 0x1000, 6
_RLIMIT_CORE = 4
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
"""Typing for others, the console, and another line discipline: the host would load a module of its kernel for it."""
_ON_FILES = (0x40086602, 0x401C5820, 0x40087602, 0x40806685, 0x800C6613)
"""FS_IOC_SETFLAGS, FSSETXATTR, SETVERSION, ENABLE_VERITY and SET_ENCRYPTION_POLICY: an open for reading is enough."""
_CLONE_NEW = 0x7E020000
"""Every flag of clone that makes a namespace."""
_NO_FAMILY = errno.EAFNOSUPPORT
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
"""Offsets into struct seccomp_data; the first argument's lower half."""

_Instruction = tuple[int, int, int, int]


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
    denied = [*DENIED.values(), *(() if namespaces else DENIED_WITHOUT_NAMESPACES.values())]
    refused = {errno.EOPNOTSUPP: {} if namespaces else ATTRIBUTES, 0: SYNCS}
    if shares_user:
        refused |= {errno.EPERM: OWNERS, 0: SYNCS | MODES_AND_TIMES}
    families = (_AF_UNIX, _AF_INET, _AF_INET6) if namespaces else ()
    controls = (_TIOCSTI, _TIOCLINUX, _TIOCSETD, *(() if namespaces else _ON_FILES))
    code: list[_Instruction] = [
        *((_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), _fail(kill=True)),
        *((_LOAD, 0, 0, _NUMBER), (_GREATER, 0, 1, CEILING), _fail(errno.ENOSYS)),
        *(part for numbers in denied for part in _refuse(numbers[column], errno.EPERM)),
        *(part for code, calls in refused.items() for n in calls.values() for part in _refuse(n[column], code)),
        # glibc falls back to clone, whose flags a filter can see
        *_refuse(_CLONE3[column], errno.ENOSYS),
        *_when(_CLONE[column], 0, ((_ANY_BIT, 0, 1, _CLONE_NEW), _fail(errno.EPERM))),
        *_when(_IOCTL[column], 1, _refuse_values(controls, errno.EPERM)),
        *_when(_SOCKET[column], 2, [*_pass(_PROTOCOLS, errno.EPROTONOSUPPORT), *_at(0, _only(families, _NO_FAMILY))]),
        *_when(_SOCKETPAIR[column], 0, _only((_AF_UNIX,), _NO_FAMILY)),
        *_when(_SETSOCKOPT[column], 1, [*_unless(_SOL_SOCKET), *_at(2, _refuse_values((_SO_LINGER,), 0))]),
        *_when(_FCNTL[column], 1, _refuse_values((_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ), errno.EPERM)),
        *_when(_PRCTL[column], 0, _refuse_values((_PR_SCHED_CORE,), errno.EINVAL)),
        *_when(_MSYNC[column], 2, ((_ANY_BIT, 0, 1, _MS_SYNC), _fail(0))),
        *_when(_SETRLIMIT[column], 0, _refuse_values((_RLIMIT_CORE,), 0)),
        *_when(
            _PRLIMIT[column],
            0,
            [
                *_pass((0,), errno.EPERM),  # its own limits only
                *_at(1, _unless(_RLIMIT_CORE)),
                *_at(2, _pass((0,), 0)),  # a new limit: none, as it is asked for
                *_at(2, _pass((0,), 0), upper=True),
            ],
        ),
        *(() if namespaces else _refuse_synchronous_writes(column)),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install(filter_: bytes) -> None:
    """Put this process, and all that come from it, under a filter for good."""
    code = ctypes.create_string_buffer(filter_)
    header = struct.pack("HxxxxxxQ", len(filter_) // 8, ctypes.addressof(code))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    number = _SECCOMP[_ARCHITECTURES[platform.machine()][0]]
    check(syscall(number, 1, 0, header), "seccomp")  # SECCOMP_SET_MODE_FILTER


def _fail(code: int = 0, *, kill: bool = False) -> _Instruction:
    return (_RETURN, 0, 0, _KILL_PROCESS if kill else _ERRNO | code)


def _refuse(number: int | None, code: int) -> list[_Instruction]:
    return [] if number is None else [(_EQUAL, 0, 1, number), _fail(code)]


def _when(number: int, argument: int, then: Iterable[_Instruction]) -> list[_Instruction]:
    """Look at an argument of one call; what `then` doesn't return on is allowed."""
    block = [(_LOAD, 0, 0, _ARGUMENT + 8 * argument), *then, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(block), number), *block]


def _at(argument: int, then: Sequence[_Instruction], *, upper: bool = False) -> list[_Instruction]:
    """Look at another argument, or its upper half, within `_when`."""
    return [(_LOAD, 0, 0, _ARGUMENT + 8 * argument + 4 * upper), *then]


def _pass(values: Sequence[int], code: int) -> list[_Instruction]:
    """Go on only with these values of the argument."""
    return [*((_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)), _fail(code)]


def _unless(value: int) -> list[_Instruction]:
    """Allow the call but with this value of the argument, with which to go on."""
    return [(_EQUAL, 1, 0, value), (_RETURN, 0, 0, _ALLOW)]


def _refuse_synchronous_writes(column: int) -> list[_Instruction]:
    """Refuse files whose every write goes to the disk, and such writes."""
    opens = [(numbers[column], argument) for numbers, argument in _OPENS]
    return [
        *_refuse(_OPENAT2[column], errno.ENOSYS),  # its flags are not in sight of a filter
        *(
            part
            for number, argument in opens
            if number is not None
            for part in _when(number, argument, ((_ANY_BIT, 0, 1, _O_DSYNC), _fail(errno.EINVAL)))
        ),
        *_when(_PWRITEV2[column], 5, ((_ANY_BIT, 0, 1, _RWF_SYNCS), _fail(errno.EOPNOTSUPP))),
    ]


def _refuse_values(values: Sequence[int], code: int) -> list[_Instruction]:
    return [part for value in values for part in ((_EQUAL, 0, 1, value), _fail(code))]


def _only(values: Sequence[int], code: int) -> list[_Instruction]:
    """Allow a call only with these values of the argument."""
    return [*(part for value in values for part in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))), _fail(code)]
