"""Attacks that no list had: on the agent beside the code, on what all users share, on counts that are the machine's.

As in `attacks`, each leaves `reached` true where it can be done; `agent` is the number of the code's parent.
"""

from __future__ import annotations

from tests.sandbox.attacks import DISK, FILES, KERNEL, MEMORY, NETWORK, PROCESSES, SIGNALS, Attack

_READ = "reached = attempt(lambda: open(f'/proc/{{os.getppid()}}/{file}', 'rb').read(1))"
_REWRITE = """\
file = f'/proc/{{os.getppid()}}/{file}'
value = (attempt(lambda: open(file).read()) or '{default}').split()[-1]
reached = attempt(lambda: os.write(os.open(file, os.O_WRONLY), value.encode()))"""
_OF_THE_AGENT = [
    *(
        Attack(f"read the agent's {what}", FILES, _READ.format(file=file))
        for what, file in {
            "memory map": "maps",
            "pages": "smaps",
            "environment": "environ",
            "auxiliary vector": "auxv",
            "stack": "stack",
            "system call": "syscall",
        }.items()
    ),
    *(
        Attack(
            f"reach through the agent's {what}",
            FILES,
            f"reached = attempt(os.listdir, f'/proc/{{os.getppid()}}/{folder}')",
        )
        for what, folder in {
            "descriptors": "fd",
            "root": "root/etc",
            "folder": "cwd",
            "mapped files": "map_files",
        }.items()
    ),
    *(
        Attack(f"change the agent's {what}", SIGNALS, _REWRITE.format(file=file, default=default))
        for what, file, default in (
            ("odds of being killed for memory", "oom_score_adj", "0"),
            ("share of its session", "autogroup", "0"),
            ("cores", "coredump_filter", "33"),
            ("timers' slack", "timerslack_ns", "50000"),
        )
    ),
    Attack(
        "forget what pages the agent used",
        SIGNALS,
        "reached = attempt(lambda: os.write(os.open(f'/proc/{os.getppid()}/clear_refs', os.O_WRONLY), b'1'))",
    ),
    Attack(
        "find the agent's locks",
        FILES,
        "a, b = (ctypes.c_ulong * 1)(), (ctypes.c_ulong * 1)()\n"
        "reached = call(274, os.getppid(), ctypes.addressof(a), ctypes.addressof(b)) == 0",
    ),
    Attack(
        "take the agent's descriptor",
        FILES,
        "reached = call(438, attempt(os.pidfd_open, os.getppid()) or -1, 0, 0) >= 0",
    ),
    Attack(
        "ask the kernel to compare with the agent",
        FILES,
        "reached = call(312, os.getpid(), os.getppid(), 1, 0, 0) >= 0",
    ),
]
_TIMERS = """\
made = 0
for _ in range(2000):
    timer = ctypes.c_int()
    if call(222, 1, 0, ctypes.addressof(timer)) != 0: break
    made += 1
reached = made == 2000"""
_IN_FLIGHT = """\
ours, held = [], attempt(os.open, '/dev/null', 0)
import resource
hard = resource.getrlimit(7)[1]
attempt(resource.setrlimit, 7, (hard, hard))
try:
    for _ in range(20):
        a, b = socket.socketpair(); ours += [a, b]
        for _ in range(10): socket.send_fds(a, [b'x'], [held] * 100)
    reached = True
except OSError: pass
for s in ours: s.close()"""
_ATTRIBUTES = """\
made = 0
for i in range(80):
    name = f'/dev/shm/attribute-{os.getpid()}-{i}'
    if attempt(lambda: open(name, 'w').close() or 1) is None: break
    for j in range(2): made += attempt(lambda: os.setxattr(name, f'user.{j}', bytes(60000)) or 1) or 0
for i in range(80): attempt(os.unlink, f'/dev/shm/attribute-{os.getpid()}-{i}')
reached = made == 160"""
_PAGE_TABLES = """\
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size, step = 130 << 30, 2 << 20
start = libc.mmap(None, size, 1, 0x4022, -1, 0)
if start not in (None, 2**64 - 1):
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 15)  # no huge pages: a table for each two megabytes
    for at in range(start, start + size, step): ctypes.c_char.from_address(at).value
    reached = True
    libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size))"""
_SET_USER = """\
import shutil, subprocess
program = next((p for p in ('/usr/bin/su', '/bin/su') if os.path.exists(p)), None)
ran = program and subprocess.run([program, '-c', 'id -u'], stdin=-3, capture_output=True, text=True)
reached = ran and ran.stdout.strip() == '0'"""
_LINKS = """\
open('one', 'w').close()
reached = None not in [attempt(lambda: os.link('one', f'link-{i}') or 1) for i in range(2000)]"""
_FOLDERS = """\
made, top = 0, os.getcwd()
while made < 400 and attempt(lambda: os.mkdir('d') or 1):
    os.chdir('d'); made += 1
os.chdir(top)
reached = made == 400"""
_CAPABILITY = """\
open('p', 'w').close()
version_2_with_cap_dac_override = bytes.fromhex('0100000202000000000000000000000000000000')
reached = attempt(lambda: os.setxattr('p', 'security.capability', version_2_with_cap_dac_override) or 1)"""
_ROOTS_FILE = """\
open('p', 'w').close()
attempt(os.chown, 'p', 0, 0)
attempt(os.chmod, 'p', 0o4755)
reached = os.stat('p').st_uid == 0 and os.stat('p').st_mode & 0o4000"""
_ON_COUNTS = [
    Attack("a flood of timers", PROCESSES, _TIMERS),
    Attack("descriptors under way", PROCESSES, _IN_FLIGHT, root=True),
    Attack(
        "a queue of messages",
        KERNEL,
        "reached = call(240, ctypes.addressof(name := ctypes.create_string_buffer(b'q')), 0o102, 0o600, 0) >= 0",
    ),
    Attack("files of attributes", DISK, _ATTRIBUTES, root=True),
    Attack(
        "links without end",
        DISK,
        _LINKS,
    ),
    Attack(
        "folders in folders",
        DISK,
        _FOLDERS,
    ),
    Attack(
        "names in a folder's way",
        DISK,
        "for i in range(2000): attempt(os.symlink, 'x' * 4000, f'l{i}')\nreached = len(os.listdir('.')) >= 2000",
    ),
    Attack("tables of pages", MEMORY, _PAGE_TABLES, fatal=True),
    Attack(
        "a filter in the kernel's memory for programs",
        KERNEL,
        "code = ctypes.create_string_buffer(bytes([6, 0, 0, 0, 255, 255, 0, 0]))\n"
        "import struct\nprogram = struct.pack('HxxxxxxQ', 1, ctypes.addressof(code))\n"
        "s = socket.socketpair()[0]\nreached = attempt(lambda: s.setsockopt(1, 26, program) or 1)",
    ),
    Attack(
        "drop files from the machine's cache",  # the call itself says so of a pipe
        KERNEL,
        "ctypes.set_errno(0)\nattempt(os.posix_fadvise, os.pipe()[0], 0, 0, 4)\n"
        "reached = ctypes.get_errno() == errno.ESPIPE",
    ),
    Attack("wake the machine", KERNEL, "reached = call(283, 9, 0) >= 0", root=True),
]
_DEVICES = (
    "mem",
    "port",
    "kvm",
    "fuse",
    "net/tun",
    "cpu_dma_latency",
    "hwrng",
    "vsock",
    "vhost-net",
    "loop-control",
    "rtc0",
    "mapper/control",
    "userfaultfd",
    "snapshot",
    "watchdog",
    "uinput",
)
_ON_RIGHTS = [
    Attack(
        "open a device",
        KERNEL,
        f"reached = [d for d in {_DEVICES!r} if attempt(os.open, '/dev/' + d, os.O_RDONLY) is not None]",
        root=True,
    ),
    Attack(
        "make a device",
        KERNEL,
        "attempt(os.mknod, 'zero', 0o20600, os.makedev(1, 5))\nreached = attempt(lambda: open('zero', 'rb').read(1))",
        root=True,
    ),
    Attack("be root by a program", KERNEL, _SET_USER, root=True),
    Attack(
        "give a program capabilities",
        KERNEL,
        _CAPABILITY,
        root=True,
    ),
    Attack(
        "make a file of root's",
        KERNEL,
        _ROOTS_FILE,
        root=True,
    ),
    *(
        Attack(
            f"set the machine's {what}",
            KERNEL,
            f"reached = attempt(os.open, '/proc/sys/{file}', os.O_WRONLY)",
            root=True,
        )
        for what, file in {
            "caches": "vm/drop_caches",
            "processes": "kernel/pid_max",
            "descriptors": "fs/file-max",
            "handler of bugs": "kernel/panic",
            "memory": "vm/overcommit_memory",
        }.items()
    ),
    Attack(
        "read the kernel's addresses",
        KERNEL,
        "reached = any(line[:16].strip('0 ') for line in (attempt(lambda: open('/proc/kallsyms').readlines()) or []))",
        root=True,
    ),
    Attack(
        "bind a low port of the host",
        NETWORK,
        "s = attempt(socket.socket)\nreached = s and attempt(lambda: s.bind(tcp[:1] + (0,)) or s.connect(tcp) or 1)",
    ),
    Attack(
        "send on a device of the host",
        NETWORK,
        "s = attempt(socket.socket)\nreached = s and attempt(lambda: s.setsockopt(1, 36, 7) or 1)",
        root=True,
    ),
]
_FILTER = """\
import struct
ins = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))  # allows all
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, ctypes.addressof(ins)))
at = ctypes.addressof(program)
call(157, 38, 1, 0, 0, 0)
"""
_NO_CORES = """\
import resource, struct
none = ctypes.create_string_buffer(struct.pack('QQ', 0, 0))
before = resource.getrlimit(4)
{change}
reached = before != (0, 0) == resource.getrlimit(4)"""
_WAITS = """\
s = attempt(socket.socket)
reached = s and (attempt(s.setsockopt, 6, {option}, 7), s.getsockopt(6, {option}))[1] == 7"""
_UPPER = 1 << 32
_ON_FILTERS = [
    Attack("filter system calls", KERNEL, _FILTER + "reached = call(317, 1, 0, at) == 0"),
    Attack("filter system calls and be asked", KERNEL, _FILTER + "reached = call(317, 1, 8, at) >= 0"),
    Attack("filter system calls by prctl", KERNEL, _FILTER + "reached = call(157, 22, 2, at) == 0"),
    Attack("filter system calls by an upper half", KERNEL, _FILTER + f"reached = call(157, {_UPPER} | 22, 2, at) == 0"),
    Attack(
        "filter a socket by an upper half",
        KERNEL,
        f"{_FILTER}s = socket.socketpair()[0]\nreached = call(54, s.fileno(), {_UPPER} | 1, 26, at, 16) == 0",
    ),
    Attack(
        "have a socket linger by an upper half",
        KERNEL,
        "s, on = socket.socketpair()[0], ctypes.create_string_buffer(bytes([1, 0, 0, 0, 9, 0, 0, 0]))\n"
        f"call(54, s.fileno(), {_UPPER} | 1, 13, ctypes.addressof(on), 8)\nreached = s.getsockopt(1, 13, 8)[0]",
    ),
    *(
        Attack(f"change the limit of cores by an upper half and {name}", KERNEL, _NO_CORES.format(change=change))
        for name, change in (
            ("setrlimit", f"call(160, {_UPPER} | 4, ctypes.addressof(none))"),
            ("prlimit64", f"call(302, 0, {_UPPER} | 4, ctypes.addressof(none), 0)"),
        )
    ),
    Attack("have a closed connection stay for minutes", KERNEL, _WAITS.format(option=8)),
    Attack("have a closed connection stay for days", KERNEL, _WAITS.format(option=18)),
]
"""On what all programs of the kernel, and all connections, have one limit of: it counts who is gone, too.

The kernel reads the lower halves of some arguments, and a filter has to look at no more of them."""
UNLISTED = [*_OF_THE_AGENT, *_ON_COUNTS, *_ON_RIGHTS, *_ON_FILTERS]
