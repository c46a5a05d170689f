"""A container: its limits and seccomp profile, the stream to its agent, and its labels.

The seccomp profile lists the system calls that code may make; all others are refused.
It starts from the list that Docker allows by default (moby/profiles, 2026, Apache-2.0), as a container of ours has no
capabilities that would add to it, and takes away:

- every call of 32-bit programs: `socketcall` would get around the rule about sockets, and few eyes see that code;
- sockets other than Unix, IPv4 and IPv6: a network namespace holds back neither AF_VSOCK, which reaches the hypervisor,
  nor AF_ALG, and AF_NETLINK is a large way into the kernel;
- `ptrace`, `process_vm_readv`, `process_vm_writev`, `sched_setscheduler` and its like, `setpriority`, `ioprio_set`, and
  `prlimit64` of another process: the agent in the container has the same user as what it runs;
- `io_setup` and its like: their events come out of one number for the whole host. `mq_open` and its like: kernel memory
  that no limit of the container counts. `memfd_secret`: memory that is not seen in any dump;
- `sync` and `syncfs`: they make the host write its disks out, as often as one likes. Protocols of sockets for which the
  host would load a module, and line disciplines of terminals, for which it would, too. Sockets that linger, as closing
  one can block a thread of the kernel's, and another limit of cores, as one of 1 is all that keeps the kernel from
  running the host's handler: these two succeed and do nothing. So does `fadvise64`: of a file of the image, it would
  drop what the host keeps in memory of it, for all containers. Filters of sockets and of
  system calls: the kernel has one limit of memory for all such programs, those of other containers' seccomp included;
- `TCP_USER_TIMEOUT` and `TCP_LINGER2`: a closed connection could outlive the container by days. They succeed and do
  nothing;
- huge pages, of `mmap` and `memfd_create`: the machine has a number of them, and no cgroup of memory counts them;
- `name_to_handle_at`, `statmount`, `listmount`: they tell of the host's file systems. `fanotify_mark`, `adjtimex`,
  `clock_adjtime`, `modify_ldt`, `personality`, `remap_file_pages`, `vmsplice`, `map_shadow_stack`, `uretprobe`: no
  program here needs them.

Old engines allow io_uring, `keyctl` or AF_VSOCK by default; with a profile of its own, a container does not depend on
the engine's age.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.process_tree import started
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.calls import WORK
from agent_rl.sandboxes.client.remote import ENTRY
from agent_rl.sandboxes.docker.engine import Engine

OVERHEAD = 32 * 1024 * 1024
"""Bytes of memory that the agent and the container's own files get on top of what the code may use."""
START_DATA = 160 * 1024 * 1024
"""The least limit of data: it holds for runc, too, which sets up seccomp under it. With 80 MiB that fails for the most
part, with 96 now and then."""
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
    # data: so that a program that wants too much gets an error, and is not killed; sparse files have no size on a tmpfs
    ulimits = {**_ULIMITS, "data": max(limits.memory, START_DATA), "fsize": limits.disk}
    own = f"rw,nosuid,nodev,uid={user},gid={user},nr_inodes={limits.files},size={limits.disk}"
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
            WORK: f"{own},exec,mode=755",  # its other users may read there
            "/tmp": f"{own},exec,mode=1777",
            "/dev/shm": f"{own},noexec,mode=1777",
        },
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits.items()],
        "LogConfig": {"Type": "none"},  # else every byte would be written to the host's disk
        "IpcMode": "private",
        "Sysctls": {"net.ipv4.tcp_orphan_retries": "2"},  # else closed connections can outlive the container by minutes
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
_ULIMITS = {"core": 1, "memlock": 0, "msgqueue": 0, "sigpending": 256, "nofile": 1024}


def any_user() -> int:
    """Draw a uid for a container: one that others share would share the kernel's counts of pipes and watches, too."""
    return USERS + secrets.randbelow(USERS)


USERS = 2**20
"""The distance of the uids of a container's users; all are above those that hosts give out."""


# The seccomp profile

ALLOWED = """
accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_getres
clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group
faccessat faccessat2 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync
fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue
futex_wait futex_waitv futex_wake futimesat get_robust_list getcpu getcwd getdents getdents64 getegid geteuid
getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid
getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr getxattrat
inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioprio_get kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr listxattrat
llistxattr lremovexattr lseek lsetxattr lstat madvise membarrier mincore mkdir mkdirat mknod
mknodat mlock mlock2 mlockall mprotect mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall
munmap nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc
pkey_free pkey_mprotect poll ppoll pread64 preadv preadv2 process_mrelease pselect6 pwrite64
pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg removexattr removexattrat
rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_yield select semctl semget semop semtimedop
sendfile sendmmsg sendmsg sendto set_robust_list set_tid_address setfsgid setfsuid setgid setgroups setitimer
setpgid setregid setresgid setresuid setreuid setsid setuid setxattr setxattrat
shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink
symlinkat sync_file_range sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat
utime utimensat utimes vfork wait4 waitid write writev
"""

_SOCKETS = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: in the container's own empty network."""
_PROTOCOLS = (0, 1, 6, 17, 58)
"""Whatever is usual, ICMP, TCP, UDP, ICMPv6."""
_SOL_SOCKET, _SO_LINGER, _SOL_TCP, _TCP_WAITS = 1, 13, 6, (8, 18)
_RLIMIT_CORE, _TIOCSETD, _PR_SET_SECCOMP = 4, 0x5423, 22
_OPTIONS = [option for option in range(1, 84) if option not in (_SO_LINGER, 26, 50, 51, 52)]
"""Of a socket: without SO_ATTACH_FILTER, SO_ATTACH_BPF and the two of SO_REUSEPORT."""
_TCP_OPTIONS = [option for option in range(1, 64) if option not in _TCP_WAITS]
"""Of a connection: without TCP_LINGER2 and TCP_USER_TIMEOUT, by which a closed one stays for minutes or days."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_MAP_HUGETLB, _MFD_HUGETLB = 0x40000, 4
_NO_SUCH_CALL, _INVALID = 38, 22
"""ENOSYS: where there is no clone3, the C library uses clone, whose flags a filter can read. EINVAL: as of a kernel
without filters of system calls."""


def seccomp_profile() -> str:
    """Return the profile as JSON, as `--security-opt seccomp=` takes it."""
    rules: list[dict[str, object]] = [{"names": ALLOWED.split(), "action": "SCMP_ACT_ALLOW"}]
    rules += [_allow_if("socket", _is(0, domain), _is(2, protocol)) for domain in _SOCKETS for protocol in _PROTOCOLS]
    rules += [_allow_if("setsockopt", test) for test in _differ(1, _SOL_SOCKET, _SOL_TCP)]
    for level, options, lies in ((_SOL_SOCKET, _OPTIONS, (_SO_LINGER,)), (_SOL_TCP, _TCP_OPTIONS, _TCP_WAITS)):
        rules += [_allow_if("setsockopt", _is(1, level), _is(2, option)) for option in options]
        rules += [{**_allow_if("setsockopt", _is(1, level), _is(2, option)), **_fail(0)} for option in lies]
    rules.append({"names": ["fadvise64"], **_fail(0)})
    rules += [_allow_if("ioctl", test) for test in _differ(1, _TIOCSETD)]
    rules += [_allow_if("prctl", test) for test in _differ(0, _PR_SET_SECCOMP)]
    rules.append({**_allow_if("prctl", _is(0, _PR_SET_SECCOMP)), **_fail(_INVALID)})
    rules.append({"names": ["seccomp"], **_fail(_INVALID)})
    rules += [_allow_if("setrlimit", test) for test in _differ(0, _RLIMIT_CORE)]
    rules.append({**_allow_if("setrlimit", _is(0, _RLIMIT_CORE)), **_fail(0)})
    rules += [_allow_if("prlimit64", _is(0, 0), test) for test in (*_differ(1, _RLIMIT_CORE), _is(2, 0))]
    own = _is(0, 0), _is(1, _RLIMIT_CORE), _is(2, 0, not_=True)
    rules.append({**_allow_if("prlimit64", *own), **_fail(0)})
    without_bits = (("clone", 0, _NEW_NAMESPACES), ("mmap", 3, _MAP_HUGETLB), ("memfd_create", 1, _MFD_HUGETLB))
    for name, index, bits in without_bits:
        rules.append(_allow_if(name, {"index": index, "value": bits, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}))
    rules.append({"names": ["clone3"], **_fail(_NO_SUCH_CALL)})
    native = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
    architectures = [{"architecture": name, "subArchitectures": []} for name in native]
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "archMap": architectures, "syscalls": rules}
    return json.dumps(profile)


def _allow_if(name: str, *tests: dict[str, object]) -> dict[str, object]:
    """Allow a call if its arguments pass all tests."""
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(tests)}


def _is(index: int, value: int, *, not_: bool = False) -> dict[str, object]:
    """Return the test that an argument has a value, or has not."""
    return {"index": index, "value": value, "op": "SCMP_CMP_NE" if not_ else "SCMP_CMP_EQ"}


def _differ(index: int, first: int, *others: int) -> list[dict[str, object]]:
    """Return the tests of which one holds if the lower half is none of the values: the kernel reads no more of it."""
    apart = functools.reduce(lambda bits, other: bits | first ^ other, others, 0)
    alike = [(1 << i, ~first & 1 << i) for i in range(32) if not apart >> i & 1]
    values = {bits | first & ~apart for bits in range(apart + 1) if not bits & ~apart} - {first, *others}
    tests = [*alike, *((0xFFFFFFFF, value) for value in sorted(values))]
    return [{"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"} for mask, value in tests]


def _fail(code: int) -> dict[str, object]:
    return {"action": "SCMP_ACT_ERRNO", "errnoRet": code}


# The stream of an attached container

_HEADER = struct.Struct(">BxxxL")
_STDERR = 2
_KEPT = 2000


class Demultiplexer:
    """Takes stdout out of what arrives; the last of stderr is kept as the agent's complaint."""

    def __init__(self) -> None:
        self.complaint = ""
        self._buffer = bytearray()
        self._kind, self._left = 0, 0

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those of stdout."""
        self._buffer += data
        out = []
        while self._left or len(self._buffer) >= _HEADER.size:
            if not self._left:
                self._kind, self._left = _HEADER.unpack_from(self._buffer)
                del self._buffer[: _HEADER.size]
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            self._left -= len(piece)
            if self._kind == _STDERR:
                self.complaint = (self.complaint + piece.decode(errors="backslashreplace"))[-_KEPT:]
            else:
                out.append(piece)
            if not self._buffer:
                break
        return b"".join(out)


# Containers whose trainer is gone

OWNER, PROCESS, EXPIRES = "agent-rl.owner", "agent-rl.process", "agent-rl.expires"
GRACE = 60.0
"""Seconds after a container's lifetime in which it may still be on its way out."""


def labels(owner: str, lifetime: float) -> dict[str, str]:
    """Return the labels of a container that this process starts now."""
    return {OWNER: owner, PROCESS: identity(os.getpid()), EXPIRES: f"{time.time() + lifetime + GRACE:.0f}"}


def identity(pid: int) -> str:
    """Return what tells a process from every other one, also on other machines and at other times.

    Raises:
        OSError: if there is no such process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}/{pid}/{started(pid)}"


def collect(engine: Engine) -> list[str]:
    """Remove containers of ended processes and of ended lifetimes; return their ids.

    Raises:
        SandboxError: if the engine can't be reached.
    """
    gone = [container for container, about in engine.labelled(PROCESS).items() if is_orphan(about)]
    for container in gone:
        with contextlib.suppress(SandboxError):  # others collect, too
            engine.remove(container)
    return gone


def is_orphan(about: dict[str, str]) -> bool:
    """Whether a container is unused by its labels; of another machine's, only the lifetime is known."""
    if time.time() > float(about[EXPIRES]):
        return True
    here, _, _ = identity(os.getpid()).rsplit("/", 2)
    there, pid, _ = about[PROCESS].rsplit("/", 2)
    if there != here:
        return False
    try:
        return identity(int(pid)) != about[PROCESS]
    except OSError:
        return True
