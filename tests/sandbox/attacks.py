"""Attacks, as data: code that tries to break one guarantee, and leaves in `reached` whether it could.

The code finds the names of `victims` defined, and `libc`, `call` (a system call by number, of x86_64) and `attempt`
(None instead of an OSError). The same code runs in a sandbox, where `reached` must be false, and in a plain
process, where it must be true: a check that can't fail proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.sandboxes.base import Guarantee

FILES, NETWORK, SIGNALS, KERNEL = Guarantee.FILES, Guarantee.NETWORK, Guarantee.SIGNALS, Guarantee.KERNEL
MEMORY, PROCESSES, DISK, KILL_ALL = Guarantee.MEMORY, Guarantee.PROCESSES, Guarantee.DISK, Guarantee.KILL_ALL


@dataclass(frozen=True)
class Attack:
    """One attempt."""

    name: str
    guarantee: Guarantee
    code: str
    root: bool = False
    """Whether even an unprotected process can do it only as root."""
    fatal: bool = False
    """Whether it may cost the sandbox its interpreter."""


_ON_FILES = [
    Attack("read a file", FILES, "reached = attempt(lambda: open(file).read()) == SECRET"),
    Attack("write a file", FILES, "reached = attempt(lambda: open(file, 'a').write('x')) == 1"),
    Attack("truncate a file", FILES, "reached = attempt(lambda: os.truncate(file, 0) or 1)"),
    Attack("make a file in a folder", FILES, "reached = attempt(lambda: open(folder + '/new', 'w').write('x')) == 1"),
    Attack("delete a file", FILES, "reached = attempt(lambda: os.unlink(file) or 1)"),
    Attack("rename a file", FILES, "reached = attempt(lambda: os.rename(file, folder + '/x') or 1)"),
    Attack("link a file", FILES, "reached = attempt(lambda: os.link(file, folder + '/linked') or 1)"),
    Attack(
        "change a file's rights",
        FILES,
        "attempt(os.chmod, file, 0o600)\nreached = oct((attempt(os.stat, file) or os.stat('.')).st_mode) == '0o100600'",
    ),
    Attack("watch a file", FILES, "reached = libc.inotify_add_watch(libc.inotify_init(), file.encode(), 0xfff) >= 0"),
    Attack("list a folder", FILES, "reached = 'secret' in (attempt(os.listdir, folder) or [])"),
    Attack(
        "look for a file", FILES, "reached = attempt(os.stat, file) is not None and attempt(open, file) is not None"
    ),
    Attack("read through a symlink", FILES, "os.symlink(file, 'link')\nreached = attempt(lambda: open('link').read())"),
    Attack("read through a symlinked folder", FILES, "os.symlink('/', 'root')\nreached = attempt(open, 'root' + file)"),
    Attack("climb out by ..", FILES, "reached = attempt(lambda: open('../' * 40 + file).read())"),
    Attack("read by a process's root", FILES, "reached = attempt(lambda: open(f'/proc/{parent}/root' + file).read())"),
    Attack("read by a process's cwd", FILES, "reached = attempt(os.listdir, f'/proc/{parent}/cwd')"),
    Attack("read a process's open files", FILES, "reached = attempt(os.listdir, f'/proc/{parent}/fd')"),
    Attack("read /etc/shadow", FILES, "reached = attempt(lambda: open('/etc/shadow').read())", root=True),
    Attack("read the answers in agent_rl", FILES, "reached = attempt(lambda: open(package).read())"),
    Attack(
        "import agent_rl",
        FILES,
        "try: import agent_rl\nexcept ImportError: agent_rl = None\nreached = agent_rl is not None",
    ),
    Attack("read shared memory", FILES, "reached = attempt(lambda: open(shared).read())"),
    Attack("read an inherited descriptor", FILES, "reached = attempt(os.pread, descriptor, 99, 0) == SECRET.encode()"),
    Attack("read the environment", FILES, "reached = SECRET in os.environ.values()"),
    Attack(
        "read a process's environment",
        FILES,
        "reached = SECRET in (attempt(lambda: open(f'/proc/{pid}/environ').read()) or '')",
    ),
    Attack("open the parent's memory", FILES, "reached = attempt(lambda: open(f'/proc/{parent}/mem', 'rb'))"),
    Attack(
        "read the parent's memory",
        FILES,
        "buffer = ctypes.create_string_buffer(len(SECRET))\n"
        "here = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), len(SECRET))\n"
        "there = (ctypes.c_uint64 * 2)(address, len(SECRET))\n"
        "libc.process_vm_readv(parent, here, 1, there, 1, 0)\n"
        "reached = buffer.raw == SECRET.encode()",
    ),
    Attack(
        "set how cores are dumped",
        FILES,
        "reached = attempt(lambda: open('/proc/sys/kernel/core_pattern', 'a'))",
        root=True,
    ),
    Attack(
        "read a disk",
        FILES,
        "attempt(os.mknod, 'disk', 0o60600, disk)\nreached = attempt(lambda: open('disk', 'rb').read(1))",
        root=True,
    ),
    Attack("read the kernel's log", FILES, "reached = attempt(os.open, '/dev/kmsg', os.O_NONBLOCK)", root=True),
    Attack("list the machine's devices", FILES, "reached = attempt(os.listdir, '/sys/class')"),
    Attack(
        "write into a cgroup",
        FILES,
        "reached = [p for p in Path('/sys/fs/cgroup').glob('**/cgroup.procs') if attempt(open, p, 'a')]",
        root=True,
    ),
    Attack(
        "read by a file handle",
        FILES,
        "reached = call(303, -100, 0, 0, 0, 0) < 0 and ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)",
    ),
    Attack("change root", FILES, "reached = attempt(lambda: os.chroot('/') or 1)", root=True),
]
_CONNECT = "s = socket.socket({family}, {kind})\n    s.settimeout(1); {use}; reached = True\nexcept OSError: pass"
_ON_NETWORK = [
    *(
        Attack(f"connect to {name}", NETWORK, "try:\n    " + _CONNECT.format(family=family, kind=kind, use=use))
        for name, family, kind, use in (
            ("a local server", "socket.AF_INET", "socket.SOCK_STREAM", "s.connect(tcp)"),
            ("a local server by IPv6", "socket.AF_INET6", "socket.SOCK_STREAM", "s.connect(tcp6)"),
            ("an abstract socket", "socket.AF_UNIX", "socket.SOCK_STREAM", "s.connect(abstract)"),
            ("a socket in a folder", "socket.AF_UNIX", "socket.SOCK_STREAM", "s.connect(path)"),
        )
    ),
    Attack(
        "send a datagram",  # as DNS does
        NETWORK,
        "try:\n    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(udp); s.send(b'x')\n"
        "    s.settimeout(0.3); s.recv(1)\nexcept TimeoutError: reached = True\nexcept OSError: pass",
    ),
    Attack("see the network's devices", NETWORK, "reached = len(attempt(socket.if_nameindex) or []) > 1"),
    Attack("make a netlink socket", NETWORK, "reached = attempt(socket.socket, 16, 3, 0)"),
    Attack("make a packet socket", NETWORK, "reached = attempt(socket.socket, 17, 3, 0)", root=True),
    Attack("make a raw socket", NETWORK, "reached = attempt(socket.socket, 2, 3, 1)", root=True),
    Attack("make a vsock socket", NETWORK, "reached = attempt(socket.socket, 40, 1, 0)"),
    Attack("make a crypto socket", NETWORK, "reached = attempt(socket.socket, 38, 5, 0)"),
]
_CHANGED = """\
link, handle = 'link', attempt(os.open, own, os.O_PATH) or -1
name, empty = ctypes.create_string_buffer(own.encode()), ctypes.addressof(nothing := ctypes.create_string_buffer(1))
attempt(os.symlink, own, link)
fd = f'/proc/self/fd/{{handle}}'
before = attempt(os.stat, own)
try: {change}
except OSError: pass
after = attempt(os.stat, own)
reached = before and after and after.st_ctime_ns != before.st_ctime_ns"""
"""Every change of metadata is seen by its time, which no call can set."""
_ON_METADATA = [
    Attack(what, FILES, _CHANGED.format(change=change))
    for what, change in {
        "change a mode": "os.chmod(own, 0o644)",
        "change a mode through a descriptor": "os.chmod(fd, 0o644)",
        "change a mode of a descriptor": "call(452, handle, empty, 0o644, 0x1000)",
        "change a mode through a symlink": "os.chmod(link, 0o644)",
        "change a mode through the cwd": "os.chdir(os.path.dirname(own)); os.chmod('/proc/self/cwd/own', 0o644)",
        "change a mode beside a folder": "os.chmod('own', 0o644, dir_fd=os.open(os.path.dirname(own), os.O_PATH))",
        "change times": "os.utime(own, (1, 1))",
        "change times through a descriptor": "os.utime(fd, (1, 1))",
        "change times to now": "os.utime(own)",
        "change times by an old call": "call(235, ctypes.addressof(name), 0)",
        "change times by an older call": "call(132, ctypes.addressof(name), 0)",
        "change times by a call in between": "call(261, -100, ctypes.addressof(name), 0)",
        "change an attribute": "os.setxattr(own, 'user.mark', b'theirs')",
        "change an attribute through a descriptor": "os.setxattr(fd, 'user.mark', b'theirs')",
        "change an attribute through a symlink": "os.setxattr(link, 'user.mark', b'theirs')",
        "take an attribute away": "os.removexattr(own, 'user.mark')",
        "take an attribute away through a descriptor": "os.removexattr(fd, 'user.mark')",
        "change an owner": "os.chown(own, -1, os.getgid())",
        "change an owner through a descriptor": "os.chown(fd, -1, os.getgid())",
        "change an owner of a descriptor": "call(260, handle, empty, -1, os.getgid(), 0x1000)",
    }.items()
]
ON_THE_HOST = [*_ON_FILES, *_ON_METADATA, *_ON_NETWORK]
