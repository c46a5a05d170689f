"""More attacks: on other processes, on the kernel, and on the limits of resources."""

from __future__ import annotations

from tests.sandbox.attacks import DISK, KERNEL, MEMORY, PROCESSES, SIGNALS, Attack

_ON_PROCESSES = [
    Attack("kill a process", SIGNALS, "reached = attempt(lambda: os.kill(pid, 9) or 1)"),
    Attack("kill a process group", SIGNALS, "reached = attempt(lambda: os.killpg(os.getpgid(pid), 0) or 1)"),
    Attack("stop a thread", SIGNALS, "reached = call(234, pid, pid, 19) == 0"),
    Attack(
        "signal by a descriptor",
        SIGNALS,
        "import signal\nreached = attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9) or 1)",
    ),
    Attack("see a process", SIGNALS, "reached = SECRET and attempt(lambda: open(f'/proc/{pid}/cmdline').read())"),
    Attack("list processes", SIGNALS, "reached = str(parent) in (attempt(os.listdir, '/proc') or [])"),
    Attack("trace a process", SIGNALS, "reached = libc.ptrace(16, pid, 0, 0) == 0"),
    Attack("seize a process", SIGNALS, "reached = libc.ptrace(0x4206, pid, 0, 0) == 0"),
    Attack("read a process's limits", SIGNALS, "import resource\nreached = attempt(resource.prlimit, pid, 7)"),
    Attack("slow a process down", SIGNALS, "reached = attempt(lambda: os.setpriority(0, pid, 5) or 1)"),
    Attack("pin a process", SIGNALS, "reached = attempt(lambda: os.sched_setaffinity(pid, {0}) or 1)"),
    Attack(
        "schedule a process",
        SIGNALS,
        "how = 3, os.sched_param(0)\nreached = attempt(lambda: os.sched_setscheduler(pid, *how) or 1)",
    ),
    Attack(
        "attach a System V segment",
        SIGNALS,
        "libc.shmat.restype = ctypes.c_void_p\nreached = libc.shmat(segment, None, 0) not in (None, 2**64 - 1)",
    ),
]
_DOOR = "reached = call({number}, {arguments}) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)"
"""A blocked call fails with EPERM for any arguments; an open one fails with another error for wrong arguments."""
_DOORS = [
    Attack(f"call {name}", KERNEL, _DOOR.format(number=number, arguments=arguments), root, fatal=name == "of x32")
    for name, number, arguments, root in (
        ("bpf", 321, "0, 0, 0", True),
        ("perf_event_open", 298, "0, 0, 0, 0, 0", True),
        ("userfaultfd", 323, "0", True),
        ("io_uring_setup", 425, "1, 0", False),
        ("io_uring_enter", 426, "-1, 0, 0, 0, 0, 0", False),
        ("open_tree", 428, "-100, 0, 0", True),
        ("move_mount", 429, "-1, 0, -1, 0, 0", True),
        ("fsopen", 430, "0, 0", True),
        ("mount_setattr", 442, "-1, 0, 0, 0, 0", True),
        ("umount2", 166, "0, 0", True),
        ("pivot_root", 155, "0, 0", True),
        ("setns", 308, "-1, 0", False),
        ("keyctl", 250, "0, -3, 0", False),
        ("add_key", 248, "0, 0, 0, 0, -3", False),
        ("request_key", 249, "0, 0, 0, -3", False),
        ("kcmp", 312, "pid, parent, 0, 0, 0", True),
        ("personality", 135, "0xffffffff", False),
        ("quotactl", 179, "0, 0, 0, 0", False),
        ("fanotify_init", 300, "0, 0", True),
        ("memfd_secret", 447, "0", False),
        ("modify_ldt", 154, "0, 0, 0", False),
        ("init_module", 175, "0, 0, 0", True),
        ("swapon", 167, "0, 0", True),
        ("syslog", 103, "10, 0, 0", True),
        ("adjtimex", 159, "0", False),
        ("clock_settime", 227, "99, 0", False),
        ("ioperm", 173, "0, 1, 0", False),
        ("mbind", 237, "0, 0, 0, 0, 0, 0", False),
        ("set_mempolicy", 238, "0, 0, 0", False),
        ("move_pages", 279, "0, 0, 0, 0, 0, 0", False),
        ("process_madvise", 440, "-1, 0, 0, 0, 0", False),
        ("pidfd_getfd", 438, "-1, 0, 0", False),
        ("open_by_handle_at", 304, "-1, 0, 0", True),
        ("statmount", 457, "0, 0, 0, 0", False),
        ("of x32", 0x40000000 + 39, "0", False),
        ("of a kernel to come", 463, "-100, 0, 0, 0, 0, 0", False),
    )
]
_ON_RIGHTS = [
    Attack("make a user namespace", KERNEL, "reached = libc.unshare(0x10000000) == 0"),
    Attack("make a mount namespace", KERNEL, "reached = libc.unshare(0x20000) == 0", root=True),
    Attack("make a network namespace", KERNEL, "reached = libc.unshare(0x40000000) == 0", root=True),
    Attack(
        "clone into a user namespace",
        KERNEL,
        "child = call(56, 0x10000011, 0, 0, 0, 0)\nchild or os._exit(0)\nreached = child > 0",
    ),
    Attack("clone by a structure that no filter can see", KERNEL, _DOOR.format(number=435, arguments="0, 0")),
    Attack(
        "mount",
        KERNEL,
        "if libc.unshare(0x20000) == 0: libc.mount(None, b'/', None, 0x44000, None)\n"
        "reached = libc.mount(b'tmpfs', b'.', b'tmpfs', 0, None) == 0",
        root=True,
    ),
    Attack("become root", KERNEL, "attempt(os.setuid, 0)\nreached = os.getuid() == 0", root=True),
    Attack(
        "have a capability",
        KERNEL,
        "data = (ctypes.c_uint32 * 6)()\nlibc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)\nreached = any(data)",
        root=True,
    ),
    Attack("gain rights by a program", KERNEL, "reached = libc.prctl(39, 0, 0, 0, 0) == 0"),
    Attack(
        "change a terminal's line discipline",
        KERNEL,
        "pair = attempt(os.openpty)\nreached = pair and libc.ioctl(pair[0], 0x5423, bytes(4)) == 0",
    ),
    Attack("take priority", KERNEL, "reached = attempt(os.nice, -5)", root=True),
    Attack(
        "name the machine",
        KERNEL,
        "n = os.uname().nodename.encode()\nreached = libc.sethostname(n, len(n)) == 0",
        root=True,
    ),
    Attack(
        "dump core",
        KERNEL,
        "import resource\nhard = resource.getrlimit(4)[1]\nresource.setrlimit(4, (hard, hard))\n"
        "child = os.fork()\nchild or os.abort()\nreached = os.WCOREDUMP(os.waitpid(child, 0)[1])",
    ),
    Attack(  # all others but 1 let the kernel run it
        "have the host's handler of cores run",
        KERNEL,
        "import resource\nresource.setrlimit(4, (0, 0))\nreached = resource.getrlimit(4) != (1, 1)",
    ),
    Attack(
        "use up the host's events", KERNEL, "c = ctypes.c_ulong(0)\nreached = call(206, 1, ctypes.addressof(c)) == 0"
    ),
    Attack(
        "make a socket linger",  # closing it can block a thread of the kernel's
        KERNEL,
        "s = attempt(socket.socket)\nattempt(lambda: s and s.setsockopt(1, 13, bytes([1, 0, 0, 0, 60, 0, 0, 0])))\n"
        "reached = s and s.getsockopt(1, 13, 8)[0] == 1",
    ),
    Attack("lock memory", KERNEL, "block = ctypes.create_string_buffer(9000)\nreached = libc.mlock(block, 9000) == 0"),
    Attack(
        "make a call of i386",
        KERNEL,
        "import mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        r"code.write(b'\x53\xb8\x14\0\0\0\xcd\x80\x5b\xc3')  # getpid by int 0x80" + "\n"
        "start = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "reached = ctypes.CFUNCTYPE(ctypes.c_int)(start)() == os.getpid()",
        fatal=True,
    ),
]
ON_THE_KERNEL = [*_ON_PROCESSES, *_DOORS, *_ON_RIGHTS]

_FILL = """\
size, made = 0, [Path({folder!r}, f"fill-{{i}}") for i in range({count})]
for path in made:
    size += attempt(path.write_bytes, bytes({each})) or 0
for path in made:
    attempt(path.unlink)
reached = size == {count} * {each}"""
_BOMBS = """\
import select, time
time.sleep({rest})
made, ready, start = set(), 0, time.monotonic()
reader, writer = os.pipe()
for _ in range(6):
    child = os.fork()
    if child == 0:
        libc.prctl({option}, 0, 0, 0, 0)
        block = bytearray(60 << 20)
        for i in range(0, len(block), 4096): block[i] = 1
        os.write(writer, b".")
        time.sleep(30); os._exit(0)
    made.add(child)
alive = set(made)
while ready < len(alive) == len(made) and time.monotonic() < start + 15:
    if select.select([reader], [], [], 0.01)[0]: ready += len(os.read(reader, 6))
    alive = {{child for child in alive if os.waitpid(child, os.WNOHANG)[0] == 0}}
stop = time.monotonic() + 3
while ready == len(alive) == len(made) and time.monotonic() < stop:
    time.sleep(0.05)
    alive = {{child for child in alive if os.waitpid(child, os.WNOHANG)[0] == 0}}
reached = ready == len(alive) == len(made)
for child in alive: os.kill(child, 9); os.waitpid(child, 0)"""
"""Wait until each child has its memory, or one was killed: both are slow on a busy machine."""
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_SEGMENTS = """\
import time
libc.shmat.restype = ctypes.c_void_p
made, reached = [libc.shmget(0, 30 << 20, 0o1600) for _ in range(10)], False
for segment in made:
    where = libc.shmat(segment, None, 0) if segment >= 0 else None
    if where: ctypes.memset(where, 1, 30 << 20); libc.shmdt(ctypes.c_void_p(where))
if min(made) >= 0: time.sleep(2); reached = True
for segment in made: libc.shmctl(segment, 0, None)"""
ON_RESOURCES = [
    Attack(
        "fork bomb",
        PROCESSES,
        "import time\nmade = []\nfor _ in range(100):\n"
        "    child = attempt(os.fork)\n    if child == 0: time.sleep(2); os._exit(0)\n"
        "    made += [child] if child else []\n"
        "reached = len(made) == 100",
    ),
    Attack(
        "thousands of threads",
        PROCESSES,
        "import threading, time\nmade = 0\nsleep = lambda: time.sleep(2)\ntry:\n"
        "    for _ in range(100): threading.Thread(target=sleep, daemon=True).start(); made += 1\n"
        "except RuntimeError: pass\nreached = made == 100",
    ),
    Attack(
        "thousands of descriptors",
        PROCESSES,
        "import resource\nhard = resource.getrlimit(7)[1]\nattempt(resource.setrlimit, 7, (hard, hard))\n"
        "reached = None not in [attempt(os.open, '/dev/null', 0) for _ in range(3000)]",
    ),
    Attack(
        "memory bomb",
        PROCESSES,
        "try: reached = len(bytearray(400 << 20))\nexcept MemoryError: pass",
    ),
    *(
        Attack(f"memory bomb of {which}", MEMORY, _BOMBS.format(rest=rest, option=option), fatal=True)
        for which, rest, option in (
            ("many processes", 0, _PR_GET_DUMPABLE),
            ("many processes after a rest", 1, _PR_GET_DUMPABLE),
            ("many processes that hide", 0, _PR_SET_DUMPABLE),
        )
    ),
    Attack(
        "memory bomb by many files in memory",
        MEMORY,
        "import time\nfds, block = [os.memfd_create('x') for _ in range(300)], bytes(1 << 20)\n"
        "reached = sum(attempt(os.write, fd, block) or 0 for fd in fds) == 300 << 20\ntime.sleep(2)",
        fatal=True,
    ),
    Attack("memory bomb by segments", MEMORY, _SEGMENTS, fatal=True),
    Attack(
        "memory bomb by a file in memory",
        MEMORY,
        "fd, block = os.memfd_create('x'), bytes(1 << 20)\n"
        "reached = sum(attempt(os.write, fd, block) or 0 for _ in range(400)) == 400 << 20",
        fatal=True,
    ),
    Attack("fill the folder", DISK, _FILL.format(count=16, folder=".", each=1 << 20)),
    Attack("fill /tmp", DISK, _FILL.format(count=16, folder="/tmp", each=1 << 20)),
    Attack("fill shared memory", DISK, _FILL.format(count=16, folder="/dev/shm", each=1 << 20)),
    Attack("flood with files", DISK, _FILL.format(count=2000, folder=".", each=1)),
    Attack(
        "write a huge file",
        DISK,
        "file, block = open('huge', 'wb', 0), bytes(1 << 20)\n"
        "reached = sum(attempt(file.write, block) or 0 for _ in range(9)) == 9 << 20",
    ),
    Attack(
        "make a huge hole",
        DISK,
        "open('hole', 'w').close()\nreached = attempt(lambda: os.truncate('hole', 1 << 40) or 1)",
    ),
]
