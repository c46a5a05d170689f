"""Trainers that open sandboxes, cancel what they do in them at random, and are killed: nothing of them is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.sandboxes.local import cgroups, homes
from tests.sandbox.backends import readable_python
from tests.sandbox.test_local import descendants, is_running

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(sys.platform != "linux", reason="local sandboxes need Linux"),
]
EACH = 25
"""How many sandboxes a trainer opens before it is killed."""
KILLS = int(os.environ.get("AGENT_RL_KILLS", "4"))
"""How many trainers with jails are killed: with 20, that is 500 jails."""
PR_SET_CHILD_SUBREAPER = 36
TRAINER = """
import asyncio, contextlib, random, sys
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.local.backend import LocalSandboxes

DAEMON = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(100)"
draw = random.Random(int(sys.argv[3]))

async def episode(sandboxes):
    box = await sandboxes.open(owner="storm", limits=Limits(memory=128 << 20, processes=16))
    print(flush=True)
    await box.run_python(DAEMON)
    await draw.choice((
        lambda: box.exec(["sleep", "9"], timeout=0.1), lambda: box.run_python("while True: pass", timeout=0.1),
        lambda: box.write_file("x", bytes(99999)), lambda: box.start(["sleep", "99"]),
    ))()
    if draw.random() < 0.7:  # else it is left to its owner's end
        await box.close()

async def main():
    sandboxes = LocalSandboxes(require=(), tier=sys.argv[1], python=sys.argv[2])
    while True:
        tasks = [asyncio.create_task(episode(sandboxes)) for _ in range(6)]
        await asyncio.sleep(draw.random() * 0.2)
        for task in draw.sample(tasks, 3):
            task.cancel()
        for said in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(said, (asyncio.CancelledError, type(None))):
                raise said

asyncio.run(main())
"""


@pytest.fixture
def orphans() -> Iterator[None]:
    """Have the processes whose parent ended become this one's: `descendants` finds them all."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def of_the_dead() -> set[str]:
    """Return the folders on this machine, of cgroups and of files, whose zygote is gone."""
    found = {
        path: path.name.removeprefix(homes.PREFIX) for path in Path(tempfile.gettempdir()).glob(f"{homes.PREFIX}*-*")
    }
    for hierarchy in cgroups.find():
        found |= {path: path.name for path in (hierarchy.path / "agent-rl").glob("*.*-*")}
    return {str(path) for path, name in found.items() if not homes.alive(name.rpartition("-")[0])}


def reaped(pids: set[int]) -> set[int]:
    """Return which of the processes run; those that ended and became ours are waited for."""
    alive = {pid for pid in pids if is_running(pid)}
    for pid in pids - alive:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return alive


def killed(tier: str, seed: int) -> int:
    """Start a trainer, kill it amid its work, and return how many sandboxes it had opened."""
    command = [sys.executable, "-c", TRAINER, tier, readable_python(), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stderr is not None
        opened = 0
        while opened < EACH + random.Random(seed).randrange(6):
            if not trainer.stdout.readline():
                said = trainer.stderr.read().decode()
                if "no local sandbox works here" in said:
                    pytest.skip(f"no {tier} here")
                raise AssertionError(said)
            opened += 1
        trainer.send_signal(signal.SIGKILL)
    return opened


@pytest.mark.parametrize(("tier", "kills"), [("jail", KILLS), ("landlock", 2)])
def test_killed_trainers_leave_nothing(orphans, tier: str, kills: int):
    family, folders = descendants(os.getpid()), of_the_dead()
    opened = 0
    for seed in range(kills):
        opened += killed(tier, seed)
        until = time.monotonic() + 5
        while (left := (reaped(descendants(os.getpid()) - family), of_the_dead() - folders)) != (set(), set()):
            assert time.monotonic() < until, f"left after 5 s by trainer {seed}: {left}"
            time.sleep(0.02)
    assert opened >= EACH * kills
