"""Attacks on the sandbox itself or the trainer: to block it, or to leave the episode unscored."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import Frames, pack
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.sandboxes.client.client import AgentSandbox
from tests.sandbox.backends import LIMITS

SEND_LINGERING = """
import os, socket, struct, threading
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3))
client.setblocking(False)
try:
    while True: client.send(bytes(65536))
except BlockingIOError: pass
def attack():
    for fd in range(3, 60):
        try: socket.send_fds(socket.socket(socket.AF_UNIX, fileno=os.dup(fd)), [bytes(8)], [client.fileno()])
        except OSError: pass
    client.close()
threading.Timer(0.3, attack).start()
"""
"""Closing this descriptor takes its receiver three seconds in the kernel."""

AIM = "import ctypes, os, resource, time\nlibc = ctypes.CDLL(None)\n"
EACH = "for pid in {os.getppid(), 1}:\n    "
ATTEMPTS = {
    "take the agent's descriptors": EACH + "resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))",
    "take the agent's processes": EACH + "resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))",
    "take the agent's memory": EACH + "resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))",
    "take the agent's processor time": EACH + "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
    "schedule the agent last": EACH + "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    "slow the agent down": EACH + "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "slow its user down": "os.setpriority(os.PRIO_USER, 0, 19)",
}
"""Each is refused, by an OSError or a PermissionError."""
ALONE = 1 << 29
"""A user without processes."""
NAMED = """
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"\\xff\\xfe)")
    time.sleep(60)
"""
"""A process whose name is no text."""
SIGNALLED = """
import fcntl, os, signal
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, 1)
fcntl.fcntl(r, 10, int(signal.SIGKILL))  # F_SETSIG
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"x")
"""


def works(run, box: Sandbox) -> bool:
    """Whether the sandbox runs commands and Python, at the latest one call after a lost interpreter."""
    said = run(box.exec(["echo", "on"], timeout=20)).stdout
    run(box.run_python("", timeout=20))
    return said == "on\n" and run(box.run_python("6 * 7", timeout=20)).value == "42"


def test_event_loop_survives_a_lingering_descriptor(box, run):
    gaps = []

    async def main() -> None:
        beating = asyncio.create_task(beat())
        await box.run_python(SEND_LINGERING, timeout=2)
        await asyncio.sleep(0.6)  # the trainer reads it at the next call
        await box.run_python("1", timeout=2)
        beating.cancel()

    async def beat() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - start)

    run(main())
    assert max(gaps) < 1.5
    assert works(run, box)


@pytest.mark.sandbox
def test_lingering_descriptor_blocks_a_socket_reader():
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours, theirs:
        reached = SEND_LINGERING.replace("range(3, 60)", f"[{theirs.fileno()}]")
        code = reached + "import time\ntime.sleep(1)\nprint(flush=True)\ntime.sleep(60)"
        attacker = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
        with attacker:
            attacker.stdout.readline()
            start = time.monotonic()
            ours.recv(65536)
            attacker.kill()
        assert time.monotonic() - start > 1.5


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_agent_is_out_of_reach_of_code(box, run, backend, attempt):
    raised = run(box.run_python(AIM + ATTEMPTS[attempt])).error
    if not (attempt == "slow its user down" and backend.name.startswith("e2b")):  # its user is not the agent's there
        assert raised is not None and ("PermissionError" in raised or "OSError" in raised), raised
    assert works(run, box)


@pytest.mark.sandbox
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_parent_is_in_reach_of_unconfined_code(attempt):
    """The twin: a parent of the same user can be limited and slowed down."""
    as_nobody_else = ""
    if "PRIO_USER" in ATTEMPTS[attempt]:  # every process of the user that runs it
        if os.geteuid() != 0:
            pytest.skip("it would slow down all of your processes")
        as_nobody_else = f"os.setuid({ALONE})\n"
    attack = f"{AIM}{as_nobody_else}if os.fork() == 0:\n    os.setsid()\n" + "".join(
        f"    {line}\n" for line in ATTEMPTS[attempt].replace(", 1}", "}").splitlines()
    )
    code = f"{attack}    os._exit(0)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert ran.stdout == "0\n" or ran.returncode < 0, ran.stderr  # it was limited, perhaps too much to say so


@pytest.mark.parametrize("code", [NAMED, SIGNALLED], ids=["a name that is no text", "a signal by a descriptor"])
def test_sandbox_survives_code(box, run, code):
    run(box.run_python(code, timeout=5))
    assert works(run, box)


def test_close_ends_spinning_processes(sandboxes, run):
    async def spin() -> float:
        box = await sandboxes.open(limits=replace(LIMITS, processes=64), lifetime=60)
        code = "import os\ntry:\n    for pid in {os.getppid(), 1}: os.sched_setscheduler(pid, 5, os.sched_param(0))\n"
        code += "except OSError: pass\nfor _ in range(60):\n    try:\n        if os.fork() == 0:\n"
        code += "            while True: pass\n    except OSError: break"
        await box.run_python(code)
        start = time.monotonic()
        await box.close()
        return time.monotonic() - start

    assert run(spin()) < 10


# The loss of a sandbox, in the episode


class Stub:
    """An agent that answers `replies` calls, and then disconnects."""

    def __init__(self, replies: int, failure: str | None = None, lifetime: float = 60.0) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.replies, self.failure, self.lifetime = replies, failure, lifetime
        self.ours = ours

    async def sandbox(self) -> AgentSandbox:
        async def ended() -> None:
            return None

        async def host_failure() -> str | None:
            return self.failure

        expires = time.monotonic() + self.lifetime
        ways = {"kill": lambda: None, "ended": ended, "host_failure": host_failure}
        box = AgentSandbox(self.ours, name="stub", expires=expires, **ways)
        self.serving = asyncio.create_task(self.serve())
        await box.ready(5)
        return box

    async def serve(self) -> None:
        loop, frames = asyncio.get_running_loop(), Frames()
        await loop.sock_sendall(self.theirs, pack({"ready": True}))
        for _ in range(self.replies):
            while (frame := frames.pop()) is None:
                frames.feed(await loop.sock_recv(self.theirs, 65536))
            answer = {"id": frame[0]["id"], "code": 0, "expired": False, "cut": False, "out": 0, "problem": None}
            await loop.sock_sendall(self.theirs, pack(answer))
        self.theirs.close()


def test_loss_after_code_ran_is_a_result(run):
    async def main() -> None:
        box = await Stub(replies=1).sandbox()
        assert (await box.exec(["true"])).returncode == 0
        for _ in range(2):
            ran = await box.exec(["true"])
            assert (ran.returncode, ran.sandbox_lost) == (-9, True) and "nothing runs in it any more" in ran.stderr
            result = await box.run_python("1")
            assert (result.value, result.state_lost, result.sandbox_lost) == (None, True, True)
        with pytest.raises(FileAccessError, match="The code in it ended it"):
            await box.read_file("x")
        with pytest.raises(FileAccessError, match="The code in it ended it"):
            await box.write_file("x", b"")
        await box.close()
        with pytest.raises(SandboxError, match="lost"):
            await box.exec(["true"])

    run(main())


@pytest.mark.parametrize(
    ("stub", "reason"),
    [
        (Stub(replies=1, failure="the engine is gone"), "the engine is gone"),
        (Stub(replies=1, lifetime=0.0), "lifetime"),
    ],
    ids=["the host failed", "its lifetime was over"],
)
def test_infrastructure_loss_is_an_error(run, stub: Stub, reason: str):
    async def main() -> None:
        box = await stub.sandbox()
        await box.exec(["true"])
        with pytest.raises(SandboxError, match=reason):
            await box.exec(["true"])
        await box.close()

    run(main())


def test_loss_before_code_ran_is_an_error(run):
    async def main() -> None:
        box = await Stub(replies=1).sandbox()
        await box.write_file("x", b"")
        with pytest.raises(SandboxError, match="the sandbox was lost"):
            await box.read_file("x")
        await box.close()

    run(main())


REPLACE = """
import os, shutil
path, done = shutil.which("python3"), []
folder = os.path.dirname(path)
for act in (
    lambda: os.unlink(path),
    lambda: os.rename(path, path + "x"),
    lambda: os.symlink("/bin/sh", folder + "/python"),
    lambda: os.rename(folder, folder + "x"),
    lambda: os.rename(os.getcwd(), os.path.dirname(os.getcwd()) + "/other"),
):
    try: act(), done.append(act.__code__.co_firstlineno)
    except OSError: pass
done
"""


def test_interpreter_of_a_sandbox_stays_in_its_place(box, backend, run):
    if backend.needs is not None and backend.name != "docker":
        pytest.skip("its place is the image's")
    assert run(box.run_python(REPLACE)).value == "[]"
    assert run(box.exec(["python3", "-c", "print(6 * 7)"])).stdout == "42\n"


def test_forged_half_surrogates_are_escaped(box, run):
    forge = (
        "import json, os, struct\nfor call in range(99):\n"
        "    head = json.dumps({'id': call, 'value': '\\ud800', 'error': None}).encode()\n"
        "    os.write(3, struct.pack('>II', len(head), 0) + head)\n"
    )
    value = run(box.run_python(forge, timeout=5)).value
    assert value is None or value.encode()
