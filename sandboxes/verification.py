"""Canaries: for each guarantee, code that tries to break it from inside a sandbox, and a look at whether it could.

They go through the public interface only, so they try every backend alike. That a canary survives is no proof; that one
dies is: a guarantee is reported as kept only if its backend names a mechanism and its canary lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits, Sandbox
from agent_rl.sandboxes.calls import FileAccessError

Spawn = Callable[[str, Limits, float], Awaitable[Sandbox]]
"""Opens a sandbox, of an owner, with limits, for some seconds."""
Canary = Callable[[Spawn], Awaitable[bool]]
"""Whether a guarantee outlived an attempt to break it."""
LIFETIME = 60.0
MIB = 1 << 20
SMALL = Limits(memory=256 * MIB, disk=4 * MIB)


async def verify(spawn: Spawn, claims: Capabilities) -> Capabilities:
    """Return the claims that hold: the mechanism of each guarantee, or None.

    Raises:
        SandboxError: if no sandbox can be opened.
    """
    claimed = [guarantee for guarantee in Guarantee if claims.get(guarantee) is not None]
    kept = await asyncio.gather(*(CANARIES[guarantee](spawn) for guarantee in claimed))
    held = dict(zip(claimed, kept, strict=True))
    return {guarantee: claims[guarantee] if held.get(guarantee) else None for guarantee in Guarantee}


@asynccontextmanager
async def _sandbox(spawn: Spawn, limits: Limits) -> AsyncIterator[Sandbox]:
    sandbox = await spawn("canary", limits, LIFETIME)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def _says(spawn: Spawn, code: str, limits: Limits = SMALL, **names: object) -> str:
    """Return the value of code's last line, with `names` defined; an exception counts as a failed check."""
    definitions = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    async with _sandbox(spawn, limits) as sandbox:
        result = await sandbox.run_python(definitions + code, timeout=20)
    return result.value if result.error is None and result.value is not None else f"failed: {result}"


FILES = """
import os
reached = []
for change in (lambda: os.chmod(file, 0o644), lambda: os.utime(file, (1, 1)),
               lambda: os.setxattr(file, 'user.x', b''), lambda: os.chown(file, -1, os.getgid())):
    try: change()
    except OSError: pass
for path in (file, '/proc/1/root' + file, f'/proc/{pid}/root' + file, f'/proc/{pid}/environ'):
    for mode in ('r', 'w'):
        try:
            with open(path, mode) as it: reached.append((path, it.read(1) if mode == 'r' else mode))
        except OSError: pass
try: open(os.path.dirname(file) + '/new', 'w').close()
except OSError: pass
reached
"""


async def files(spawn: Spawn) -> bool:
    """A file of the host's is neither read nor written, its metadata is not changed, and no file is put beside it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        file = Path(folder, "secret")
        file.write_text("host")
        file.chmod(0o666)
        changed = file.stat().st_ctime_ns
        said = await _says(spawn, FILES, file=str(file), pid=os.getpid())
        kept = file.read_text() == "host" and file.stat().st_ctime_ns == changed
        return said == "[]" and kept and [path.name for path in Path(folder).iterdir()] == ["secret"]


NETWORK = """
import socket
reached = []
for family, address in ((socket.AF_INET, tcp), (socket.AF_UNIX, abstract), (socket.AF_UNIX, path)):
    try:
        s = socket.socket(family); s.settimeout(0.5); s.connect(address); reached.append(address)
    except OSError: pass
for family, kind in ((40, 1), (16, 3), (17, 3), (38, 5)):  # vsock, netlink, packet, alg
    try: socket.socket(family, kind); reached.append(family)
    except OSError: pass
reached
"""


async def network(spawn: Spawn) -> bool:
    """No listener of the host's is reached, by TCP or a Unix socket of either kind; no other kind of socket is made."""
    abstract = f"\0agent-rl-canary-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Path(folder).chmod(0o755)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listeners = [tcp]
        for address in (abstract, f"{folder}/socket"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
            listeners.append(listener)
        Path(folder, "socket").chmod(0o777)
        for listener in listeners:
            listener.setblocking(False)
        said = await _says(spawn, NETWORK, tcp=tcp.getsockname(), abstract=abstract, path=f"{folder}/socket")
        return said == "[]" and not any(_was_reached(listener) for listener in listeners)


def _was_reached(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


SIGNALS = """
import ctypes, os
reached = []
libc = ctypes.CDLL(None, use_errno=True)
try: reached += [1] if b'sleep' in open(f'/proc/{pid}/cmdline', 'rb').read() else []
except OSError: pass
if libc.ptrace(16, pid, 0, 0) == 0: reached.append(2)
try: os.kill(pid, 9)
except OSError: pass
reached
"""


async def signals(spawn: Spawn) -> bool:
    """A process of the host's is neither seen, traced nor killed."""
    process = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        said = await _says(spawn, SIGNALS, pid=process.pid)
        await asyncio.sleep(0.02)
        return said == "[]" and process.poll() is None
    finally:
        process.kill()
        process.wait()


MEMORY = """
import os, time
pids, held, until, (ready, done) = set(), 0, time.monotonic() + 15, os.pipe()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        block = bytearray(size)
        for i in range(0, size, 4096): block[i] = 1
        os.write(done, b'.')
        time.sleep(30)
    pids.add(pid)
os.set_blocking(ready, False)
while len(pids) == 3 and time.monotonic() < until:  # on a busy machine, they take their time
    try:
        held += len(os.read(ready, 3))
        until = time.monotonic() + 3 if held == 3 else until  # a watchdog may be late
    except BlockingIOError: time.sleep(0.01)
    pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
len(pids) < 3
"""


async def memory(spawn: Spawn) -> bool:
    """Three processes that take half of the limit each are not all left alive."""
    async with _sandbox(spawn, replace(SMALL, memory=128 * MIB)) as sandbox:
        result = await sandbox.run_python(f"size = {64 * MIB}\n{MEMORY}", timeout=20)
    return result.value == "True" or (result.state_lost and not result.timed_out)  # the interpreter may be among them


KILL_ALL = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        with open('heartbeat', 'ab', buffering=0) as file:
            while True: file.write(b'.'); time.sleep(0.002)
    os._exit(0)
while True: time.sleep(1)
"""


async def kill_all(spawn: Spawn) -> bool:
    """A process that left its session and its parent, and ignores signals, doesn't outlive a timeout."""
    for timeout in (0.4, 2.0, 10.0):  # on a busy machine, it takes a while until the heart beats
        async with _sandbox(spawn, SMALL) as sandbox:
            result = await sandbox.run_python(KILL_ALL, timeout=timeout)
            try:
                beats = await sandbox.read_file("heartbeat")
            except FileAccessError:
                continue
            if beats:
                await asyncio.sleep(0.05)
                return result.timed_out and beats == await sandbox.read_file("heartbeat")
    return False


KERNEL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
data = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
refused = all(libc.syscall(number, 0, 0, 0) < 0 and ctypes.get_errno() in (1, 38)
              for number in (425, 428, 430))  # io_uring_setup, open_tree, fsopen
namespaces = [libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)]
mounted = libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0
no_new_privs = libc.prctl(39, 0, 0, 0, 0) == 1
not any(data) and no_new_privs and refused and 0 not in namespaces and not mounted
"""
"""There are no rights, no new ones to be had, and no namespaces, mounts or io_uring."""
PROCESSES = """
import os, time
count = 1
try:
    while count < 40:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        count += 1
except OSError: pass
count <= 24
"""
"""No more processes can be made than the limit says."""
CPU = """
import hashlib, os, threading, time
start, block = time.monotonic(), bytes(1 << 16)
def burn():
    while time.monotonic() < start + 0.6: hashlib.sha256(block)  # lets the other thread run
for _ in range(2):
    if os.fork() == 0:
        thread = threading.Thread(target=burn); thread.start(); burn(); thread.join()
        os._exit(0)
used = sum(sum(os.wait3(0)[2][:2]) for _ in range(2))
used < 1.4 * (time.monotonic() - start)
"""
"""Two computing processes with two threads each get no more than one processor."""
DISK = """
import os, tempfile
within = []
for make in (os.ftruncate, lambda fd, size: os.posix_fallocate(fd, 0, size)):
    with open('huge', 'wb') as file:
        try: make(file.fileno(), 1 << 30)
        except OSError: pass
        within.append(os.fstat(file.fileno()).st_size <= 1 << 20)
    os.unlink('huge')
for folder in ('.', tempfile.gettempdir()):
    size = count = 0
    for i in range(200):
        try:
            with open(f'{folder}/{i}', 'wb', buffering=0) as file:
                count += 1; size += file.write(bytes(1 << 16))
        except OSError: pass
    within.append(size <= 1 << 20 and count <= 100)
all(within)
"""
"""Neither the bytes nor the files exceed what is allowed, in either folder, nor one file, written or not."""


def _program(code: str, limits: Limits = SMALL) -> Canary:
    """Return the canary that is kept if a program's last line is true."""

    async def canary(spawn: Spawn) -> bool:
        return await _says(spawn, code, limits) == "True"

    return canary


CANARIES: Mapping[Guarantee, Canary] = {
    Guarantee.FILES: files,
    Guarantee.NETWORK: network,
    Guarantee.SIGNALS: signals,
    Guarantee.KERNEL: _program(KERNEL),
    Guarantee.MEMORY: memory,
    Guarantee.PROCESSES: _program(PROCESSES, replace(SMALL, processes=16)),
    Guarantee.CPU: _program(CPU),
    Guarantee.DISK: _program(DISK, replace(SMALL, disk=MIB, files=100)),
    Guarantee.KILL_ALL: kill_all,
}
