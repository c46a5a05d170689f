"""Arguments of system calls by which code reaches past its sandbox into the one kernel that all have.

No namespace, capability or limit stops them. The filters of local sandboxes and of Docker's containers both go by these
numbers; each says in its own words which calls fail, and how.
"""

from __future__ import annotations

AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
FAMILIES = (AF_UNIX, AF_INET, AF_INET6)
"""Those that a network namespace bounds."""
STREAM, DATAGRAM, RAW = 1, 2, 3
SOCKET_FLAGS = 0x80800
"""SOCK_CLOEXEC and SOCK_NONBLOCK, in the same argument as the type."""
PROTOCOLS = (0, 1, 6, 17, 58)
"""Whatever is usual, ICMP, TCP, UDP, ICMPv6."""
SOCKETS = {
    (AF_INET, STREAM): (0, 6),
    (AF_INET, DATAGRAM): (0, 1, 17),
    (AF_INET6, STREAM): (0, 6),
    (AF_INET6, DATAGRAM): (0, 17, 58),
}
"""The protocols of each family and type: to ask for another one, or for another type, makes the host load a module of
its kernel. So does a raw socket without a protocol, before the kernel looks whether its caller may have it."""
ON_BRIDGES = (0x8940, 0x8941, 0x8982, 0x8983, 0x89A0, 0x89A1)
"""SIOCGIFBR to SIOCBRDELBR, and of VLANs: on a socket of any family they have the host load a module, too."""
ON_TERMINALS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX and TIOCSETD: typing for others, the console, and another line discipline, for which the host
would load a module of its kernel."""
IOCTLS = (*ON_TERMINALS, *ON_BRIDGES)
PRCTLS = (22, 62, 78)
"""PR_SET_SECCOMP, `seccomp` by another name; PR_SCHED_CORE, what keeps a core's other threads idle; PR_FUTEX_HASH, a
table of any size in the kernel's memory."""
NEW_NAMESPACES = 0x7E020000
"""Every flag of clone that makes a namespace: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
MAP_HUGETLB, MFD_HUGETLB = 0x40000, 4
"""Huge pages are the machine's, which has a number of them set aside, and no cgroup of memory counts them."""
MANY_SEMAPHORES = 0x7FFFFFC0
"""64 or more in one set: the kernel holds 32,000 sets for a sandbox, in memory that nothing but a cgroup counts."""
SYNCS = ("sync", "syncfs", "fsync", "fdatasync", "sync_file_range")
"""The calls that have the host write its disks out, as often as code likes."""
MS_SYNC = 4
MADVICE = (20, 21)
"""MADV_COLD and MADV_PAGEOUT: what the machine keeps in memory of a mapped file goes first, or at once."""
RLIMIT_CORE = 4
SOL_SOCKET, SO_LINGER, SO_BUFFERS = 1, 13, (7, 8)
"""SO_LINGER: closing such a socket keeps its closer in the kernel. SO_SNDBUF and SO_RCVBUF: only some cgroups count
what sockets hold, and at the usual size each holds little."""
SO_ATTACH = (26, 50, 51, 52)
"""SO_ATTACH_FILTER, BPF, REUSEPORT_CBPF and EBPF: all programs in the kernel share one limit of memory. When that is
used up, no further sandbox opens."""
SOL_TCP, TCP_WAITS = 6, (8, 18)
"""TCP_LINGER2 and TCP_USER_TIMEOUT: how long a closed connection stays whose other end is silent, up to 24 days, after
its sandbox too."""

CONNECTIONS = {**dict.fromkeys(("tcp_rmem", "tcp_wmem"), "4096 65536 131072"), "tcp_orphan_retries": "2"}
"""What a sandbox's network has in /proc/sys/net/ipv4. Bytes of a connection's buffers: the least, at first, at most, as
all of the machine share TCP's memory. And how often a closed connection is tried again whose other end is silent: as
code may have it ignore what comes (IP_MINTTL), these would outlive their sandbox by minutes."""
