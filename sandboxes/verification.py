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
from pathlib import Path

from agent_rl.sandboxes.base import Capabilities, FileAccessError, Guarantee, Limits, Sandbox

Spawn = Callable[[str, Limits, float], Awaitable[Sandbox]]
"""Opens a sandbox, of an owner, with limits, for some seconds."""
LIFETIME = 60.0
MIB = 1 << 20


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


async def _says(spawn: Spawn, code: str, limits: Limits | None = None, **names: object) -> str:
    """Return the value of code's last line, with `names` defined; an exception counts as a failed check."""
    definitions = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    async with _sandbox(spawn, limits or Limits(memory=256 * MIB, disk=4 * MIB)) as sandbox:
        result = await sandbox.run_python(definitions + code, timeout=20)
    return result.value if result.error is None and result.value is not None else f"failed: {result}"


async def files(spawn: Spawn) -> bool:
    """A file of the host's is neither read nor written, its metadata is not changed, and no file is put beside it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        file = Path(folder, "secret")
        file.write_text("host")
        file.chmod(0o666)
        changed = file.stat().st_ctime_ns
        code = (
            "import os\nreached = []\n"
            "for change in (lambda: os.chmod(file, 0o644), lambda: os.utime(file, (1, 1)),\n"
            "               lambda: os.setxattr(file, 'user.x', b''), lambda: os.chown(file, -1, os.getgid())):\n"
            "    try: change()\n"
            "    except OSError: pass\n"
            "for path in (file, '/proc/1/root' + file, f'/proc/{pid}/root' + file, f'/proc/{pid}/environ'):\n"
            "    for mode in ('r', 'w'):\n"
            "        try:\n"
            "            with open(path, mode) as it: reached.append((path, it.read(1) if mode == 'r' else mode))\n"
            "        except OSError: pass\n"
            "try: open(os.path.dirname(file) + '/new', 'w').close()\n"
            "except OSError: pass\n"
            "reached"
        )
        said = await _says(spawn, code, file=str(file), pid=os.getpid())
        kept = file.read_text() == "host" and file.stat().st_ctime_ns == changed
        return said == "[]" and kept and [path.name for path in Path(folder).iterdir()] == ["secret"]


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
        code = (
            "import socket\nreached = []\n"
            "for family, address in ((socket.AF_INET, tcp), (socket.AF_UNIX, abstract), (socket.AF_UNIX, path)):\n"
            "    try:\n"
            "        s = socket.socket(family); s.settimeout(0.5); s.connect(address); reached.append(address)\n"
            "    except OSError: pass\n"
            "for family, kind in ((40, 1), (16, 3), (17, 3), (38, 5)):\n"  # vsock, netlink, packet, alg
            "    try: socket.socket(family, kind); reached.append(family)\n"
            "    except OSError: pass\n"
            "reached"
        )
        said = await _says(spawn, code, tcp=tcp.getsockname(), abstract=abstract, path=f"{folder}/socket")
        return said == "[]" and not any(_was_reached(listener) for listener in listeners)


def _was_reached(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


async def signals(spawn: Spawn) -> bool:
    """A process of the host's is neither seen, traced nor killed."""
    process = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        code = (
            "import ctypes, os\nreached = []\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            "try: reached += [1] if b'sleep' in open(f'/proc/{pid}/cmdline', 'rb').read() else []\n"
            "except OSError: pass\n"
            "if libc.ptrace(16, pid, 0, 0) == 0: reached.append(2)\n"
            "try: os.kill(pid, 9)\n"
            "except OSError: pass\n"
            "reached"
        )
        said = await _says(spawn, code, pid=process.pid)
        await asyncio.sleep(0.02)
        return said == "[]" and process.poll() is None
    finally:
        process.kill()
        process.wait()


async def kernel(spawn: Spawn) -> bool:
    """There are no rights, no new ones to be had, and no namespaces, mounts, keys, BPF or io_uring."""
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "data = (ctypes.c_uint32 * 6)()\n"
        "libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)\n"
        "wrong = [] if not any(data) else ['capabilities']\n"
        "wrong += [] if libc.prctl(39, 0, 0, 0, 0) == 1 else ['no_new_privs']\n"
        "wrong += [name for name, number in (('io_uring', 425), ('open_tree', 428), ('fsopen', 430))\n"
        "          if libc.syscall(number, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38)]\n"
        "wrong += [hex(flag) for flag in (0x10000000, 0x20000, 0x40000000) if libc.unshare(flag) == 0]\n"
        "wrong += ['mount'] if libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0 else []\n"
        "wrong"
    )
    return await _says(spawn, code) == "[]"


async def memory(spawn: Spawn) -> bool:
    """Three processes that take half of the limit each are not all left alive."""
    code = (
        "import os, time\npids, held, until, (ready, done) = set(), 0, time.monotonic() + 15, os.pipe()\n"
        "for _ in range(3):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        block = bytearray(size)\n"
        "        for i in range(0, size, 4096): block[i] = 1\n"
        "        os.write(done, b'.')\n"
        "        time.sleep(30)\n"
        "    pids.add(pid)\n"
        "os.set_blocking(ready, False)\n"
        "while len(pids) == 3 and time.monotonic() < until:\n"  # on a busy machine, they take their time
        "    try:\n"
        "        held += len(os.read(ready, 3))\n"
        "        until = time.monotonic() + 3 if held == 3 else until\n"  # a watchdog may be late
        "    except BlockingIOError: time.sleep(0.01)\n"
        "    pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}\n"
        "len(pids) < 3"
    )
    async with _sandbox(spawn, Limits(memory=128 * MIB, disk=4 * MIB)) as sandbox:
        result = await sandbox.run_python(f"size = {64 * MIB}\n{code}", timeout=20)
    return result.value == "True" or (result.state_lost and not result.timed_out)  # the interpreter may be among them


async def processes(spawn: Spawn) -> bool:
    """No more processes can be made than the limit says."""
    code = (
        "import os, time\ncount = 1\n"
        "try:\n"
        "    while count < 40:\n"
        "        if os.fork() == 0: time.sleep(30); os._exit(0)\n"
        "        count += 1\n"
        "except OSError: pass\n"
        "count <= 24"
    )
    return await _says(spawn, code, Limits(memory=256 * MIB, processes=16, disk=4 * MIB)) == "True"


async def cpu(spawn: Spawn) -> bool:
    """Two computing processes with two threads each get no more than one processor."""
    code = (
        "import hashlib, os, threading, time\nstart, block = time.monotonic(), bytes(1 << 16)\n"
        "def burn():\n"
        "    while time.monotonic() < start + 0.6: hashlib.sha256(block)\n"  # lets the other thread run
        "for _ in range(2):\n"
        "    if os.fork() == 0:\n"
        "        thread = threading.Thread(target=burn); thread.start(); burn(); thread.join()\n"
        "        os._exit(0)\n"
        "used = sum(sum(os.wait3(0)[2][:2]) for _ in range(2))\n"
        "used < 1.4 * (time.monotonic() - start)"
    )
    return await _says(spawn, code, Limits(memory=256 * MIB, cpus=1.0, disk=4 * MIB)) == "True"


async def disk(spawn: Spawn) -> bool:
    """Neither the bytes nor the files exceed what is allowed, in either folder, nor one file, written or not."""
    code = (
        "import os, tempfile\nwithin = []\n"
        "for make in (os.ftruncate, lambda fd, size: os.posix_fallocate(fd, 0, size)):\n"
        "    with open('huge', 'wb') as file:\n"
        "        try: make(file.fileno(), 1 << 30)\n"
        "        except OSError: pass\n"
        "        within.append(os.fstat(file.fileno()).st_size <= 1 << 20)\n"
        "    os.unlink('huge')\n"
        "for folder in ('.', tempfile.gettempdir()):\n"
        "    size = count = 0\n"
        "    for i in range(200):\n"
        "        try:\n"
        "            with open(f'{folder}/{i}', 'wb', buffering=0) as file:\n"
        "                count += 1; size += file.write(bytes(1 << 16))\n"
        "        except OSError: pass\n"
        "    within.append(size <= 1 << 20 and count <= 100)\n"
        "all(within)"
    )
    return await _says(spawn, code, Limits(memory=256 * MIB, disk=MIB, files=100)) == "True"


async def kill_all(spawn: Spawn) -> bool:
    """A process that left its session and its parent, and ignores signals, doesn't outlive a timeout."""
    code = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for number in range(1, 32):\n"
        "            try: signal.signal(number, signal.SIG_IGN)\n"
        "            except OSError: pass\n"
        "        with open('heartbeat', 'ab', buffering=0) as file:\n"
        "            while True: file.write(b'.'); time.sleep(0.002)\n"
        "    os._exit(0)\n"
        "while True: time.sleep(1)"
    )
    for timeout in (0.4, 2.0, 10.0):  # on a busy machine, it takes a while until the heart beats
        async with _sandbox(spawn, Limits(memory=256 * MIB, disk=4 * MIB)) as sandbox:
            result = await sandbox.run_python(code, timeout=timeout)
            try:
                beats = await sandbox.read_file("heartbeat")
            except FileAccessError:
                continue
            if beats:
                await asyncio.sleep(0.05)
                return result.timed_out and beats == await sandbox.read_file("heartbeat")
    return False


CANARIES: Mapping[Guarantee, Callable[[Spawn], Awaitable[bool]]] = {
    Guarantee.FILES: files,
    Guarantee.NETWORK: network,
    Guarantee.SIGNALS: signals,
    Guarantee.KERNEL: kernel,
    Guarantee.MEMORY: memory,
    Guarantee.PROCESSES: processes,
    Guarantee.CPU: cpu,
    Guarantee.DISK: disk,
    Guarantee.KILL_ALL: kill_all,
}
