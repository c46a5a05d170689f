"""How sandboxes are lost: the cause that the host finds, and as what the episode counts."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.core.messages import JSON
from agent_rl.core.sandbox_loss import COUNTS_AS, Cause, SandboxLoss, find_cause
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import Frames, pack
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.sandboxes.client import client
from agent_rl.sandboxes.client.alarm import STALL
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import LIMITS, readable_python

GOOD = {"code": 0, "expired": False, "cut": False, "out": 0}
ACTS: Mapping[Cause, tuple[bytes, bool] | None] = {
    Cause.AGENT_ENDED: (b"", True),
    Cause.BAD_FRAME: (b"\xff" * 64, False),
    Cause.AGENT_FAILED: (pack({"id": 2, "failed": "exec: no process"}), False),
    Cause.SILENT: None,
}
"""What the agent does when the second command comes, by what the host calls it: its bytes, and whether it hangs up."""
LACKING = pack({"id": 2, **GOOD, "code": "x"})


async def nothing() -> None:
    return None


@dataclass
class Staged:
    """A sandbox whose agent answers a command well, and then `act`s; the host is in some state."""

    act: tuple[bytes, bool] | None
    ran: bool = True
    is_over: bool = False
    failure: str | None = None
    counts: Mapping[str, JSON] = field(default_factory=dict)
    lost_as: str | None = None
    patience: float | None = None
    """Seconds that each call may take; None: enough, but for the last one of an agent that is silent."""

    async def lose(self, *, close: bool = False) -> tuple[AgentSandbox, object]:
        """Return the sandbox, and what came of the command in which it was lost."""
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        expires = time.monotonic() + (0.0 if self.is_over else 60.0)
        box = AgentSandbox(
            ours,
            expires=expires,
            kill=lambda: None,
            ended=nothing,
            host_failure=self.host_failure,
            evidence=self.evidence,
        )
        serving = asyncio.create_task(self.serve())
        await box.ready(60)
        with patience(self.patience or 60):
            if self.ran:
                assert (await box.exec(["true"], timeout=0.01)).returncode == 0
            else:
                await box.write_file("x", b"")
        if close:
            await box.close()
        with patience(self.patience or (0.01 if self.act is None else 60)):
            call = box.exec(["true"], timeout=0.01) if self.ran else box.read_file("x")
            (found,) = await asyncio.gather(call, return_exceptions=True)
        self.lost_as = box.fate.lost
        self.theirs.close()
        serving.cancel()
        await box.close()
        return box, found

    async def host_failure(self) -> str | None:
        return self.failure

    async def evidence(self, ended: bool) -> Mapping[str, JSON]:
        return self.counts if ended else {}

    async def serve(self) -> None:
        loop, frames = asyncio.get_running_loop(), Frames()
        await loop.sock_sendall(self.theirs, pack({"ready": True}))
        for answer in (pack({"id": 1, **GOOD, "problem": None}), None):
            while frames.pop() is None:
                if not (data := await loop.sock_recv(self.theirs, 65536)):
                    return
                frames.feed(data)
            sent, hangs_up = (answer, False) if answer else self.act or (b"", False)
            await loop.sock_sendall(self.theirs, sent)
            if hangs_up:
                self.theirs.shutdown(socket.SHUT_RDWR)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Wait so long for an agent, beyond a command's own time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "GRACE", seconds)
        patch.setattr(client, "FILE_TIMEOUT", seconds)
        yield


def lose(runner: asyncio.Runner, staged: Staged, *, close: bool = False) -> tuple[AgentSandbox, object]:
    return runner.run(staged.lose(close=close))


OWN_LIMIT = {"status": -9, "oom_kills": 1, "limit_hits": 4}
HOST_OOM = {"status": -9, "oom_kills": 1, "limit_hits": 0}


@settings(max_examples=40, deadline=None)
@given(
    seen=st.sampled_from(list(ACTS)),
    ran=st.booleans(),
    host=st.sampled_from(["well", "closed", "over", "gone", "short of memory"]),
    own_limit=st.booleans(),
)
def test_loss_counts_by_whose_act_it_was(runner, seen: Cause, ran: bool, host: str, own_limit: bool):
    counts = HOST_OOM if host == "short of memory" else OWN_LIMIT if own_limit else {"status": 1}
    gone = "the engine is gone" if host == "gone" else None
    staged = Staged(ACTS[seen], ran=ran, is_over=host == "over", failure=gone, counts=counts)
    box, found = lose(runner, staged, close=host == "closed")
    memory = seen is Cause.AGENT_ENDED and host == "short of memory"
    expected = (
        Cause.CLOSED
        if host == "closed"
        else Cause.UNUSED
        if not ran
        else {"over": Cause.LIFETIME, "gone": Cause.BACKEND_GONE}.get(host)
        or (
            Cause.HOST_MEMORY if memory else Cause.MEMORY if counts is OWN_LIMIT and seen is Cause.AGENT_ENDED else seen
        )
    )
    assert box.loss is not None and box.loss.cause is expected
    is_policys = ran and (host == "well" or (host == "short of memory" and not memory))
    assert box.loss.is_failure is is_policys
    if is_policys:
        assert found.sandbox_lost and found.returncode == -9
    else:
        assert isinstance(found, SandboxError) and found.loss == box.loss and not isinstance(found, FileAccessError)


def test_answer_that_lacks_a_status_is_a_bad_frame(runner):
    box, found = lose(runner, Staged((LACKING, False)))
    assert found.sandbox_lost and box.loss.cause is Cause.BAD_FRAME


def test_find_cause_never_charges_infrastructure():
    for seen in Cause:
        for ran in (False, True):
            cause = find_cause(seen, has_run_code=ran, evidence=OWN_LIMIT)
            assert (COUNTS_AS[cause] == "failure") <= (ran and COUNTS_AS[seen] == "failure")
    assert set(COUNTS_AS) == set(Cause)


def test_late_event_loop_is_not_a_silent_agent(run):
    """The answer is there when the alarm is: the host itself stood still."""

    async def main() -> None:
        staged = Staged((pack({"id": 2, **GOOD}), False), patience=0.01)
        losing = asyncio.create_task(staged.lose())
        await asyncio.sleep(0.005)
        time.sleep(STALL + 0.2)
        box, found = await losing
        assert not found.sandbox_lost and staged.lost_as is None and box.loss is None

    run(main())


# The jail


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Leave the process four descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 5, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.dup(held[0]))
        for _ in range(min(4, len(held) - 1)):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def test_full_descriptor_table_is_infrastructure(box, sandboxes, backend, run):
    for call in (lambda: box.run_python("1"), sandboxes.open):
        with few_descriptors(), pytest.raises(SandboxError, match=os.strerror(errno.EMFILE)) as caught:
            run(call())
        assert caught.value.loss.cause is Cause.HOST_RESOURCES
    assert run(box.run_python("6 * 7")).value == "42" and box.loss is None


def test_sandbox_has_the_interpreter_as_python3(box, backend, run):
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True).stdout"
    assert run(box.run_python(code)).value == "b'42\\n'"
    version = run(box.run_python("import sys\nsys.version")).value
    assert run(box.exec(["python3", "-c", "import sys; print(repr(sys.version))"])).stdout.strip() == version
    if backend.needs is None:  # whatever it is called, and whether or not the machine has one of that name
        assert run(box.exec(["sh", "-c", "command -v python3"])).stdout.endswith("/python/python3\n")


@pytest.fixture
def small_host(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A cgroup that has less memory than a sandbox in it may use: a host that is short of it."""
    folder = Path("/sys/fs/cgroup/memory", f"agent-rl-test-{os.getpid()}")
    if os.geteuid() != 0 or not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists():
        pytest.skip("needs root, and cgroups of version 1 with memory")
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{160 << 20}")
    yield folder
    for inner in sorted(folder.rglob("*/"), reverse=True):
        inner.rmdir()
    for _ in range(100):  # its processes are about to be gone
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.02)


FILL = "x = bytearray(1 << 30)\nfor i in range(0, len(x), 4096): x[i] = 1"


@pytest.mark.sandbox
@pytest.mark.parametrize("command", [False, True], ids=["python", "command"])
def test_host_without_memory_is_infrastructure(run, small_host: Path, command: bool):
    join = ("sh", "-c", f'echo $$ > {small_host}/cgroup.procs; exec "$@"', "sh")
    local = LocalSandboxes(Limits(memory=2 << 30), tier="jail", python=readable_python(), launcher=join, require=())

    async def main() -> None:
        box = await local.open()
        try:
            await (box.exec(["python3", "-c", FILL]) if command else box.run_python(FILL))
        finally:
            await local.close()

    with pytest.raises(SandboxError, match="too little memory") as caught:
        run(main())
    assert caught.value.loss.cause is Cause.HOST_MEMORY and caught.value.loss.evidence["oom_kills"]


def test_own_memory_limit_is_a_result(sandboxes, run):
    async def main() -> None:
        box = await sandboxes.open(limits=LIMITS)
        filled = await box.run_python(FILL)
        assert filled.error is not None and box.loss is None
        await box.close()

    run(main())


def test_killed_agent_is_a_loss_with_evidence(run):
    """The price: from outside, this is what code that ends its agent would look like."""

    async def main() -> SandboxLoss | None:
        local = LocalSandboxes(LIMITS, require=())
        box = await local.open()
        await box.run_python("1")
        zygote = local._zygote._process.pid
        (agent,) = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
        os.kill(int(agent), signal.SIGKILL)
        assert (await box.exec(["true"])).sandbox_lost
        await local.close()
        return box.loss

    loss = run(main())
    assert loss.cause is Cause.AGENT_ENDED and loss.evidence["status"] == -signal.SIGKILL


def test_warm_sandboxes_are_unused(run):
    """What a pool runs in one is not the policy's code."""

    async def main() -> None:
        local = LocalSandboxes(LIMITS, require=())
        box = await local.open()
        await box.run_python("")
        box._lose("staged")
        with pytest.raises(SandboxError) as caught:
            await box.run_python("1")
        assert caught.value.loss.cause is Cause.UNUSED
        await local.close()

    run(main())
