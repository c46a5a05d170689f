"""The seccomp profile of our containers.

It lists the system calls that code may make; all others are refused. It starts from the list that Docker allows by
default (moby/profiles, 2026, Apache-2.0), as a container of ours has no capabilities that would add to it, and takes
away:

- every call of 32-bit programs: `socketcall` would get around the rule about sockets, and few eyes see that code;
- sockets other than Unix, IPv4 and IPv6: a network namespace holds back neither AF_VSOCK, which reaches the hypervisor,
  nor AF_ALG, and AF_NETLINK is a large way into the kernel;
- `ptrace`, `process_vm_readv`, `process_vm_writev`, `sched_setscheduler` and its like, `setpriority`, `ioprio_set`, and
  `prlimit64` of another process: the agent in the container has the same user as what it runs;
- `io_setup` and its like: their events come out of one number for the whole host. `mq_open` and its like: kernel memory
  that no limit of the container counts. `memfd_secret`: memory that is not seen in any dump;
- what local sandboxes refuse, too (`syscall_arguments`), as the kernel is the host's. For types and protocols of
  sockets, questions about bridges and VLANs, and line disciplines of terminals, the host would load a module. Filters
  of sockets and of system calls share one limit of memory with other containers' seccomp. Nor does code get a table for
  futexes, large sets of semaphores, huge pages, or a core without other threads (PR_SCHED_CORE);
- what they pretend to do, too. The calls succeed and do nothing, as programs would stop at an error: `fsync`, `sync`,
  `msync` and their like make the host write its disks out, as often as one likes; `fadvise64` would drop a file of the
  image from the host's memory, for all containers, and two advices of `madvise` have it go first; closing a socket that
  lingers can block a thread of the kernel's; larger buffers of sockets take memory that only some cgroups count; with
  `TCP_USER_TIMEOUT` and `TCP_LINGER2` a closed connection could outlive the container by days; and a limit of cores of
  1 is all that keeps the kernel from running the host's handler;
- `name_to_handle_at`, `statmount`, `listmount`: they tell of the host's file systems. `fanotify_mark`, `adjtimex`,
  `clock_adjtime`, `modify_ldt`, `personality`, `remap_file_pages`, `vmsplice`, `map_shadow_stack`, `uretprobe`: no
  program here needs them.

Old engines allow io_uring, `keyctl` or AF_VSOCK by default; with a profile of its own, a container does not depend on
the engine's age. Reads past the host's memory (`O_DIRECT`) are allowed: `openat2` hides its flags from filters, and the
engine's runc itself may make that call under this profile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agent_rl.sandboxes import syscall_arguments as arguments

ALLOWED = """
accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_getres
clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group
faccessat faccessat2 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl
fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs ftruncate futex futex_requeue
futex_wait futex_waitv futex_wake futimesat get_robust_list getcpu getcwd getdents getdents64 getegid geteuid
getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid
getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr getxattrat
inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioprio_get kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr listxattrat
llistxattr lremovexattr lseek lsetxattr lstat membarrier mincore mkdir mkdirat mknod
mknodat mlock mlock2 mlockall mprotect mremap mseal msgctl msgget msgrcv msgsnd munlock munlockall
munmap nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc
pkey_free pkey_mprotect poll ppoll pread64 preadv preadv2 process_mrelease pselect6 pwrite64
pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg removexattr removexattrat
rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_yield select semctl semop semtimedop
sendfile sendmmsg sendmsg sendto set_robust_list set_tid_address setfsgid setfsuid setgid setgroups setitimer
setpgid setregid setresgid setresuid setreuid setsid setuid setxattr setxattrat
shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat statfs statx symlink
symlinkat sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat
utime utimensat utimes vfork wait4 waitid write writev
"""

_LOWER_HALF = 0xFFFFFFFF
_OPTIONS = range(1, 84)
"""Of a socket: all that there are, SO_ATTACH and those that do nothing among them."""
_TCP_OPTIONS = range(1, 64)
_NO_SUCH_CALL, _INVALID = 38, 22
"""ENOSYS: where there is no clone3, the C library uses clone, whose flags a filter can read. EINVAL: as of a kernel
without filters of system calls."""

Test = Mapping[str, int | str]
"""Of one argument."""
Rule = Mapping[str, Any]


def seccomp_profile() -> str:
    """Return the profile as JSON, as `--security-opt seccomp=` takes it."""
    rules = [_allow(ALLOWED.split()), *_sockets(), *_options(), *_values(), *_bits(), *_limits()]
    rules.append(_answer(["fadvise64", *arguments.SYNCS], 0))
    rules.append(_answer(["seccomp"], _INVALID))
    rules.append(_answer(["clone3"], _NO_SUCH_CALL))
    native = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
    architectures = [{"architecture": name, "subArchitectures": []} for name in native]
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "archMap": architectures, "syscalls": rules}
    return json.dumps(profile)


def _sockets() -> Iterator[Rule]:
    """Allow sockets in the container's own empty network, and pairs."""
    for protocol in arguments.PROTOCOLS:
        yield _allow(["socket"], _is(0, arguments.AF_UNIX), _is(2, protocol))
    for (family, type_), protocols in arguments.SOCKETS.items():
        either_way = _masked(1, _LOWER_HALF & ~arguments.SOCKET_FLAGS, type_)
        for protocol in protocols:
            yield _allow(["socket"], _is(0, family), either_way, _is(2, protocol))
    yield _allow(["socketpair"], _is(0, arguments.AF_UNIX))


def _options() -> Iterator[Rule]:
    """Allow options of sockets, and have some do nothing."""
    for test in _differ(1, arguments.SOL_SOCKET, arguments.SOL_TCP):
        yield _allow(["setsockopt"], test)
    lies = (arguments.SO_LINGER, *arguments.SO_BUFFERS)
    for level, options, nothing in (
        (arguments.SOL_SOCKET, set(_OPTIONS).difference(arguments.SO_ATTACH), lies),
        (arguments.SOL_TCP, set(_TCP_OPTIONS), arguments.TCP_WAITS),
    ):
        for option in sorted(options):
            tests = _is(1, level), _is(2, option)
            yield _answer(["setsockopt"], 0, *tests) if option in nothing else _allow(["setsockopt"], *tests)


def _values() -> Iterator[Rule]:
    """Allow calls unless an argument has one of some values; say of these that they failed, or succeeded."""
    for name, index, values, code in (
        ("ioctl", 1, arguments.IOCTLS, None),
        ("prctl", 0, arguments.PRCTLS, _INVALID),
        ("madvise", 2, arguments.MADVICE, 0),
        ("setrlimit", 0, (arguments.RLIMIT_CORE,), 0),
    ):
        for test in _differ(index, *values):
            yield _allow([name], test)
        if code is not None:
            for value in values:
                yield _answer([name], code, _is(index, value))


def _bits() -> Iterator[Rule]:
    """Allow calls without some bits of an argument."""
    for name, index, bits in (
        ("clone", 0, arguments.NEW_NAMESPACES),
        ("mmap", 3, arguments.MAP_HUGETLB),
        ("memfd_create", 1, arguments.MFD_HUGETLB),
        ("semget", 1, arguments.MANY_SEMAPHORES),
        ("msync", 2, arguments.MS_SYNC),
    ):
        yield _allow([name], _masked(index, bits, 0))
    yield _answer(["msync"], 0, _masked(2, arguments.MS_SYNC, arguments.MS_SYNC))


def _limits() -> Iterator[Rule]:
    """Allow a process to see and set its own limits; to set that of cores does nothing."""
    for test in (*_differ(1, arguments.RLIMIT_CORE), _is(2, 0)):
        yield _allow(["prlimit64"], _is(0, 0), test)
    yield _answer(["prlimit64"], 0, _is(0, 0), _is(1, arguments.RLIMIT_CORE), _is(2, 0, not_=True))


def _allow(names: list[str], *tests: Test) -> Rule:
    """Allow calls if their arguments pass all tests."""
    return {"names": names, "action": "SCMP_ACT_ALLOW", **({"args": list(tests)} if tests else {})}


def _answer(names: list[str], code: int, *tests: Test) -> Rule:
    """Answer calls with an errno, or as if they had succeeded (0), if their arguments pass all tests."""
    return {**_allow(names, *tests), "action": "SCMP_ACT_ERRNO", "errnoRet": code}


def _is(index: int, value: int, *, not_: bool = False) -> Test:
    """Return the test that an argument has a value, or has not."""
    return {"index": index, "value": value, "op": "SCMP_CMP_NE" if not_ else "SCMP_CMP_EQ"}


def _masked(index: int, mask: int, value: int) -> Test:
    """Return the test that some bits of an argument have a value."""
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _differ(index: int, *values: int) -> list[Test]:
    """Return the tests of which one holds if the lower half is none of the values: the kernel reads no more of it."""
    tests = []
    for bit in range(32):
        mask = _LOWER_HALF & ~((1 << bit) - 1)  # this bit and those above it
        above = {value >> bit + 1 for value in values}
        there = {value >> bit for value in values}
        tests += [
            _masked(index, mask, beside << bit)
            for beside in sorted({start << 1 | last for start in above for last in (0, 1)} - there)
        ]
    return tests
