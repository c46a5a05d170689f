"""The e2b backend: the real SDK against a server that speaks its wire format, and the service if there is a key."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.e2b import E2BSandboxes
from tests.e2e.conftest import missing, not_run
from tests.sandbox.backends import E2B_KEY, LIMITS

try:
    from tests.sandbox.e2b_server import Service, serve
except ImportError as error:
    LACKING: str | None = f"the tests of the e2b sandbox: {error}; pip install 'agent-rl[e2b]' uvicorn"
else:
    LACKING = None

pytestmark = pytest.mark.e2e
Use = Callable[["Service", E2BSandboxes], Awaitable[None]]


@pytest.fixture(autouse=True)
def needed() -> None:
    if LACKING:
        missing(LACKING)


@asynccontextmanager
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    async with serve(LIMITS) as (running, address):
        for name, value in (
            ("API_URL", address),
            ("SANDBOX_URL", address),
            ("HTTP_VERSION", "1.1"),
            ("API_KEY", E2B_KEY),
        ):
            monkeypatch.setenv(f"E2B_{name}", value)
        yield running


def against_it(monkeypatch: pytest.MonkeyPatch, use: Use) -> None:
    async def main() -> None:
        async with service(monkeypatch) as running:
            sandboxes = E2BSandboxes()
            await use(running, sandboxes)
            await sandboxes.close()
            assert not running.machines

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("suite", ["test_contract.py", "test_contract_files.py", "test_attacks.py", "test_endings.py"])
def test_e2b_passes_the_suites_of_every_backend(suite: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.sandbox.e2b_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None and server.stdin is not None
        address = server.stdout.readline().strip()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "sandbox",
            f"tests/sandbox/{suite}",
            "-k",
            "e2b and not limits_are",
            "--tb=short",
        ]
        environment = {**os.environ, "AGENT_RL_E2B_ADDRESS": address}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        server.stdin.close()
    print(ran.stdout)
    assert ran.returncode == 0 and int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 10


def test_variables_and_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open(owner="me", lifetime=99.5)
        await sandbox.run_python("x = 20")
        assert (await sandbox.run_python("x + 1")).value == "21"
        data = os.urandom(1_000_000)
        await sandbox.write_file("a/b", data)
        assert await sandbox.read_file("/work/a/b") == data
        (machine,) = running.machines.values()
        assert machine.asked["timeout"] == math.ceil(99.5) and machine.asked["metadata"] == {"agent-rl.owner": "me"}
        assert machine.asked["allow_internet_access"] is False

    against_it(monkeypatch, use)


def test_closing_ends_the_microvm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open()
        assert len(running.machines) == 1
        await sandbox.close()
        await sandbox.close()
        assert not running.machines
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])

    against_it(monkeypatch, use)


def test_the_service_ends_what_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open(lifetime=2)
        with pytest.raises(SandboxError):
            await sandbox.exec(["sleep", "60"], timeout=90)
        assert not running.machines

    against_it(monkeypatch, use)


def test_a_service_that_is_gone_is_a_typed_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open()
        for name in tuple(running.machines):
            await running.end(name)
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])

    against_it(monkeypatch, use)


def test_a_wrong_key_is_a_typed_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        with pytest.raises(SandboxError, match="no such key"):
            await E2BSandboxes(api_key="e2b_" + "1" * 40).open()

    against_it(monkeypatch, use)


def test_what_is_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="E2B_API_KEY"):
        E2BSandboxes()
    with pytest.raises(ConfigError, match="lifetime"):
        asyncio.run(E2BSandboxes(api_key=E2B_KEY).open(lifetime=1e6))


def test_the_service_itself() -> None:
    if not os.environ.get("E2B_API_KEY"):
        not_run("the e2b sandbox against the service: set E2B_API_KEY")

    async def main() -> None:
        sandboxes = E2BSandboxes()
        sandbox = await sandboxes.open(owner="agent-rl's tests", lifetime=120)
        try:
            await sandbox.run_python("x = 20")
            assert (await sandbox.run_python("x + 1")).value == "21"
            ran = await sandbox.exec(["sh", "-c", "id -un; setsid sleep 60 & sleep 60"], timeout=2)
            assert ran.timed_out and ran.stdout == "user\n"
            assert (await sandbox.exec(["pgrep", "-c", "sleep"])).stdout == "0\n"
        finally:
            await sandboxes.close()

    asyncio.run(main())
