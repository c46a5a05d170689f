"""Users of a container beside the first: how they are confined, and what attacks on their agents come to."""

from __future__ import annotations

import pytest

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.docker import Engine
from tests.e2e.dockerd import is_empty
from tests.e2e.test_docker import in_container

pytestmark = pytest.mark.e2e

CONFINED = "grep -E 'Cap|NoNew|Seccomp:' /proc/self/status; ulimit -a; cat /proc/self/cgroup; readlink /proc/self/ns/*"
KILLER = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p = $$ ] || kill -9 $p; done; sleep 60"


FULL = """
import os, time
while True:
    try:
        if not os.fork():
            time.sleep(100)
    except OSError:
        print("full", flush=True)
        time.sleep(100)
"""


def test_docker_users_are_confined_and_end_with_the_sandbox(engine: Engine) -> None:
    async def use(sandbox: Sandbox) -> None:
        confined = [(await sandbox.exec(["sh", "-c", CONFINED], user=user)).stdout for user in (None, "tests")]
        assert confined[0] == confined[1] and "NoNewPrivs:\t1" in confined[0]
        vsock = ["python3", "-c", "import socket; socket.socket(40, socket.SOCK_STREAM)"]
        assert "PermissionError" in (await sandbox.exec(vsock, user="tests")).stderr
        for name in ("b", "c", "d"):
            await sandbox.exec(["true"], user=name)
        with pytest.raises(ConfigError, match="at most 4 users"):
            await sandbox.exec(["true"], user="e")
        assert (await sandbox.exec(["sh", "-c", KILLER], user="tests")).sandbox_lost  # its own agent
        assert sandbox.loss is not None and sandbox.loss.is_failure and sandbox.loss.cause == "agent_ended"
        assert (await sandbox.exec(["true"])).sandbox_lost and (await sandbox.exec(["true"], user="b")).sandbox_lost

    in_container(engine, use)
    assert is_empty(engine)


def test_docker_users_that_find_no_room_are_the_codes_fault(engine: Engine) -> None:
    async def use(sandbox: Sandbox) -> None:
        hog = await sandbox.start(["python3", "-c", FULL])
        assert (await hog.read()).data == b"full\n"
        assert (await sandbox.exec(["true"], user="tests")).sandbox_lost
        assert sandbox.loss is not None and sandbox.loss.is_failure

    in_container(engine, use)
