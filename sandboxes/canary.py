"""What a backend really keeps, found by trying to break it: a sandbox with small limits, and code that means harm.

Only what is tried counts: a guarantee holds if every one of its attempts failed in the way it should. The attempts aim
at a file, a process and two listeners that are made here for the purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits, Sandbox, Sandboxes

LIMITS = Limits(memory=64 * 2**20, processes=16, cpus=0.25, disk=4 * 2**20, files=64)
"""Of the sandbox that is tried; small, so that going beyond them is quick and does no harm where they are not kept."""
_TIMEOUT = 20.0

_PRELUDE = """
import ctypes, errno, json, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
target = json.loads(sys.argv[1])
def attempt(what):
    try:
        return what() is not False
    except (OSError, MemoryError):
        return False
"""
_ATTEMPTS = {
    Guarantee.FILES: """
paths = target["file"], f"/proc/{target['pid']}/environ", f"/proc/{target['pid']}/root" + target["file"]
print(json.dumps([path for path in paths if attempt(lambda: target["secret"] in open(path).read())]))
""",
    Guarantee.NETWORK: """
def reach(family, address):
    with socket.socket(family) as s:
        s.settimeout(2)
        s.connect(address)
ways = {
    "loopback": lambda: reach(socket.AF_INET, ("127.0.0.1", target["port"])),
    "abstract": lambda: reach(socket.AF_UNIX, chr(0) + target["abstract"]),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
}
print(json.dumps([name for name, way in ways.items() if attempt(way)]))
""",
    Guarantee.SIGNALS: """
attempt(lambda: os.kill(target["pid"], 9))  # the number may be somebody's in here: outside one sees who is gone
print(json.dumps([]))
""",
    Guarantee.KERNEL: """
x86, arm = (os.uname().machine == m for m in ("x86_64", "aarch64"))
numbers = {"bpf": (321, 280), "io_uring_setup": (425, 425), "perf_event_open": (298, 241), "keyctl": (250, 219),
           "userfaultfd": (323, 282)}
ways = {name: lambda n=pair[arm]: libc.syscall(n, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38)
        for name, pair in numbers.items() if x86 or arm}
ways |= {"unshare": lambda: libc.unshare(0x10000000) == 0, "mount": lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, 0) == 0,
         "setuid": lambda: libc.setuid(0) == 0, "clock": lambda: time.clock_settime(0, time.time()),
         "mknod": lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)), "chroot": lambda: os.chroot("/tmp")}
print(json.dumps([name for name, way in ways.items() if attempt(way)]))
""",
    Guarantee.MEMORY: """
def hold(end):
    data = bytearray(40 * 2**20)
    data[::4096] = b"x" * len(data[::4096])
    os.write(end, b"x")
    time.sleep(3)
come, go = os.pipe()
for _ in range(4):
    if not os.fork():
        try:
            hold(go)
        finally:
            os._exit(0)
os.close(go)
held, until = 0, time.monotonic() + 2
os.set_blocking(come, False)
while time.monotonic() < until and held < 4:
    try:
        held += len(os.read(come, 8))
    except BlockingIOError:
        time.sleep(0.02)
print(json.dumps([f"{held} x 40 MiB"] if held == 4 else []))
""",
    Guarantee.PROCESSES: """
made = 0
def one():
    global made
    if not os.fork():
        time.sleep(5)
        os._exit(0)
    made += 1
while made < 64 and attempt(one):
    pass
print(json.dumps([f"{made} processes"] if made >= 64 else []))
""",
    Guarantee.CPU: """
for _ in range(8):  # together they get their share even where others are at work
    if not os.fork():
        until = time.monotonic() + 1
        while time.monotonic() < until:
            pass
        os._exit(0)
for _ in range(8):
    os.wait()
used = os.times().children_user + os.times().children_system
print(json.dumps([f"{used:.2f} s of processor time in a second"] if used > 0.5 else []))
""",
    Guarantee.DISK: """
def fill(folder):
    with open(f"{folder}/big", "wb") as file:
        for _ in range(12):
            file.write(bytes(2**20))
            file.flush()
def litter(folder):
    for i in range(512):
        open(f"{folder}/{i}", "w").close()
broken = []
for folder in (os.getcwd(), "/tmp"):
    for way in (fill, litter):
        try:
            way(folder)
            broken.append(f"{way.__name__} {folder}")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                broken.append(str(error))
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
print(json.dumps(broken))
""",
}
"""Code that prints which of its attempts succeeded, as a list."""

_DAEMON = """
if not os.fork():
    os.setsid()
    if not os.fork():
        for fd in range(3):
            os.close(fd)
        while True:
            with open("beat", "w") as file:
                file.write(str(time.monotonic()))
            time.sleep(0.02)
    os._exit(0)
time.sleep(60)
"""



@dataclass(frozen=True, slots=True)
class Bait:
    """What the attempts aim at, outside."""

    file: str
    """Anyone may read it; it holds `secret`."""
    secret: str
    pid: int
    """Of a process that sleeps."""
    port: int
    """Where somebody listens on 127.0.0.1."""
    abstract: str
    """Where somebody listens on an abstract Unix socket."""


async def try_out(sandboxes: Sandboxes, mechanisms: Mapping[Guarantee, str]) -> Capabilities:
    """Return the mechanisms of those guarantees that were kept when they were tried, and None for the others.

    Args:
        sandboxes: of whose kind one is tried.
        mechanisms: by what each guarantee should be kept; what is missing is not tried.

    Raises:
        SandboxError: if no sandbox can be had.
    """
    found: dict[Guarantee, str | None] = dict.fromkeys(Guarantee)
    async with contextlib.AsyncExitStack() as stack:
        bait = stack.enter_context(put_out_bait())
        sandbox: Sandbox | None = None
        for guarantee, mechanism in mechanisms.items():
            if sandbox is None:
                sandbox = await sandboxes.open(owner="canary", limits=LIMITS, lifetime=300.0)
                stack.push_async_callback(sandbox.close)
            if await broken(sandbox, guarantee, bait):
                sandbox = None  # who knows what is left of it
            else:
                found[guarantee] = mechanism
    return found


async def broken(sandbox: Sandbox, guarantee: Guarantee, bait: Bait) -> list[str]:
    """Return by which ways a guarantee was broken in a sandbox, which may be unusable afterwards."""
    code = _PRELUDE + _ATTEMPTS.get(guarantee, _DAEMON)
    argv = ["python3", "-c", code, json.dumps(asdict(bait))]
    try:
        if guarantee is Guarantee.KILL_ALL:
            return await _outlives(sandbox, argv)
        ran = await sandbox.exec(argv, timeout=_TIMEOUT)
    except SandboxError as error:
        return [f"the sandbox itself was lost: {error}"]
    if guarantee is Guarantee.SIGNALS and not _sleeps(bait.pid):
        return ["the process outside is gone"]
    try:
        return [str(way) for way in json.loads(ran.stdout)]
    except ValueError:
        if guarantee is Guarantee.MEMORY and ran.returncode:  # the kernel took the process that counts, too
            return []
        return [f"the attempt ended with {ran.returncode}: {ran.stderr[-300:]}"]


async def _outlives(sandbox: Sandbox, argv: Sequence[str]) -> list[str]:
    """Return whether a daemon goes on after the timeout of the command that started it."""
    ran = await sandbox.exec(argv, timeout=1.0)
    if not ran.timed_out:
        return [f"the attempt ended with {ran.returncode}: {ran.stderr[-300:]}"]
    beats = []
    for _ in range(2):
        beats.append(await sandbox.read_file("beat"))
        await asyncio.sleep(0.2)
    return [] if beats[0] == beats[1] else ["a daemon goes on after the timeout"]


@contextlib.contextmanager
def put_out_bait() -> Iterator[Bait]:
    """Make what the attempts aim at, and remove it afterwards."""
    secret, abstract = secrets.token_hex(8), f"agent-rl-{secrets.token_hex(8)}"
    asleep = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="agent-rl-canary-") as folder,
            socket.create_server(("127.0.0.1", 0)) as tcp,
            socket.socket(socket.AF_UNIX) as unix,
        ):
            Path(folder).chmod(0o755)
            file = Path(folder, "secret")
            file.write_text(secret)
            unix.bind(f"\0{abstract}")
            unix.listen()
            yield Bait(str(file), secret, asleep.pid, tcp.getsockname()[1], abstract)
    finally:
        asleep.kill()
        asleep.wait()


def _sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return False
