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
from pathlib import Path

import pytest

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.e2b import E2BSandboxes, jupyter
from tests.e2e.skips import missing, not_run
from tests.sandbox.backends import E2B_KEY, LIMITS, SUITES

try:
    from tests.sandbox.e2b_machine import Machine
    from tests.sandbox.e2b_server import Service, serve
except ImportError as error:
    LACKING: str | None = f"the tests of the e2b sandbox: {error}; pip install 'agent-rl[e2b]' uvicorn"
else:
    LACKING = None

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
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


def against_it(monkeypatch: pytest.MonkeyPatch, use: Use, *, interpreter: str = "agent") -> None:
    async def main() -> None:
        async with service(monkeypatch) as running:
            sandboxes = E2BSandboxes(interpreter=interpreter)
            await use(running, sandboxes)
            await sandboxes.close()
            assert not running.machines

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("backend", ["e2b", "e2b-jupyter"])
def test_e2b_passes_the_suites_of_every_backend(backend: str, suite: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.sandbox.e2b_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None and server.stdin is not None
        address = server.stdout.readline().strip()
        these = backend if backend == "e2b-jupyter" else "e2b and not jupyter"
        command = [sys.executable, "-m", "pytest", "-m", "sandbox", suite, "-k", these, "--tb=short"]
        environment = {**os.environ, "AGENT_RL_E2B_ADDRESS": address}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        server.stdin.close()
    print(ran.stdout)
    assert ran.returncode == 0 and int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 5


@pytest.mark.parametrize(
    "settings",
    [("env_args.sandbox=e2b",), ("env_args.sandbox=e2b", "env_args.sandbox_args.interpreter=jupyter")],
    ids=["agent", "jupyter"],
)
def test_readme_command_uses_e2b(settings: tuple[str, ...], tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.sandbox.e2b_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None and server.stdin is not None
        address = server.stdout.readline().strip()
        e2b = {"API_URL": address, "SANDBOX_URL": address, "HTTP_VERSION": "1.1", "API_KEY": E2B_KEY}
        words = ["rollout", "env=python-v0", "policy=oracle", *settings, "n=2"]
        ran = subprocess.run(
            [sys.executable, "-m", "agent_rl", *words],
            cwd=tmp_path,
            env={**os.environ, **{f"E2B_{name}": value for name, value in e2b.items()}, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        server.stdin.close()
    assert ran.returncode == 0 and "success 100.0%" in ran.stdout, ran.stdout + ran.stderr


def test_e2b_sandbox_keeps_variables_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_e2b_close_ends_the_microvm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open()
        assert len(running.machines) == 1
        await sandbox.close()
        await sandbox.close()
        assert not running.machines
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])

    against_it(monkeypatch, use)


def test_e2b_service_ends_expired_microvm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open(lifetime=2)
        with pytest.raises(SandboxError):
            await sandbox.exec(["sleep", "60"], timeout=90)
        assert not running.machines

    against_it(monkeypatch, use)


def test_e2b_raises_sandbox_error_for_lost_microvm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open()
        for name in tuple(running.machines):
            await running.end(name)
        while "lost" not in repr(sandbox):  # a call that is under way by then may have caused it, for all that is known
            await asyncio.sleep(0.01)
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])

    against_it(monkeypatch, use)


def test_e2b_raises_sandbox_error_for_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(running: Service, sandboxes: E2BSandboxes) -> None:
        with pytest.raises(SandboxError, match="no such key"):
            await E2BSandboxes(api_key="e2b_" + "1" * 40).open()

    against_it(monkeypatch, use)


def test_e2b_refuses_missing_key_and_long_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="E2B_API_KEY"):
        E2BSandboxes()
    with pytest.raises(ConfigError, match="lifetime"):
        asyncio.run(E2BSandboxes(api_key=E2B_KEY).open(lifetime=1e6))


# The code interpreter


def with_jupyter(monkeypatch: pytest.MonkeyPatch, use: Callable[[AgentSandbox, Machine], Awaitable[None]]) -> None:
    async def open_one(running: Service, sandboxes: E2BSandboxes) -> None:
        sandbox = await sandboxes.open(lifetime=100)
        (machine,) = running.machines.values()
        await use(sandbox, machine)

    against_it(monkeypatch, open_one, interpreter="jupyter")


def test_e2b_kernel_shares_folder_with_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sandbox: AgentSandbox, machine: Machine) -> None:
        assert machine.asked["templateID"] == "code-interpreter-v1"
        assert [context.cwd for context in machine.contexts.values()] == ["/work"]
        await sandbox.write_file("data", b"from outside")
        assert (await sandbox.run_python("x = open('data').read()\nx")).value == "'from outside'"
        assert (await sandbox.run_python("len(x)")).value == "12"
        assert (await sandbox.exec(["pwd"])).stdout == "/work\n"

    with_jupyter(monkeypatch, use)


def test_e2b_timeout_kills_the_kernel_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sandbox: AgentSandbox, machine: Machine) -> None:
        result = await sandbox.run_python("print('so far')\nwhile True: pass", timeout=0.5)
        assert (result.stdout, result.timed_out, result.state_lost, result.error) == ("so far\n", True, True, None)
        assert machine.sweeps == 1 and result.seconds < 10
        assert (await sandbox.run_python("1 + 1")).value == "2"

    with_jupyter(monkeypatch, use)


def test_e2b_run_python_cancelled_ends_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sandbox: AgentSandbox, machine: Machine) -> None:
        call = asyncio.create_task(sandbox.run_python("x = 1\nwhile True: pass"))
        await asyncio.sleep(0.5)
        for _ in range(3):  # repeated cancellations don't kill the next call
            call.cancel()
            await asyncio.sleep(0.001)
        ran = await sandbox.exec(["echo", "next"])
        (context,) = machine.contexts.values()
        assert (ran.stdout, call.cancelled(), machine.sweeps, context.count) == ("next\n", True, 1, 1)
        assert "NameError" in str((await sandbox.run_python("x")).error)

    with_jupyter(monkeypatch, use)


def test_e2b_ends_microvm_past_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sandbox: AgentSandbox, machine: Machine) -> None:
        monkeypatch.setattr(jupyter, "PATIENCE", 0.5)
        machine.deaf = True
        start = asyncio.get_running_loop().time()
        result = await sandbox.run_python("while True: pass", timeout=0.5)
        assert result.sandbox_lost and "code interpreter failed: TimeoutError" in str(result.error)
        assert asyncio.get_running_loop().time() - start < 5
        await sandbox.close()
        assert machine.gone.is_set()

    with_jupyter(monkeypatch, use)


@pytest.mark.parametrize("how", ["the service", "close", "close, of which the service takes no notice"])
def test_e2b_call_ends_with_the_microvm(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The code in a microVM may have caused its end by the service: such an end is a result."""

    async def use(sandbox: AgentSandbox, machine: Machine) -> None:
        machine.deaf = how.endswith("notice")
        call = asyncio.create_task(sandbox.run_python("import time; time.sleep(60)"))
        await asyncio.sleep(0.7)
        start = asyncio.get_running_loop().time()
        if how == "the service":
            await machine.end()
            assert (await call).sandbox_lost and (await sandbox.run_python("1")).sandbox_lost
        else:
            await sandbox.close()
            for lost in (call, sandbox.run_python("1")):
                with pytest.raises(SandboxError, match="closed"):
                    await lost
        assert asyncio.get_running_loop().time() - start < 10

    with_jupyter(monkeypatch, use)


def test_e2b_reports_state_lost_after_kernel_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sandbox: AgentSandbox, machine: Machine) -> None:
        (context,) = machine.contexts.values()
        context.count = 0  # as after a restart of a dead kernel by Jupyter
        result = await sandbox.run_python("x = 1")
        assert result.state_lost and result.error == "the interpreter had ended before this call"
        assert "NameError" in str((await sandbox.run_python("x")).error)

    with_jupyter(monkeypatch, use)


def test_e2b_limits_output_kept_by_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sandbox: AgentSandbox, machine: Machine) -> None:
        monkeypatch.setattr(jupyter, "MAX_FLOOD", 100_000)
        result = await sandbox.run_python("print('x' * 100_001)", max_output=1000)
        assert result.state_lost and "printed more than 100000" in str(result.error)
        assert machine.sweeps == 1
        assert (await sandbox.run_python("print('x' * 9_000)")).error is None

    with_jupyter(monkeypatch, use)


# The service


@pytest.mark.parametrize("interpreter", ["agent", "jupyter"])
def test_e2b_service_runs_code_and_commands(interpreter: str) -> None:
    if not os.environ.get("E2B_API_KEY"):
        not_run("the e2b sandbox against the service: set E2B_API_KEY")

    async def main() -> None:
        sandboxes = E2BSandboxes(interpreter=interpreter)
        sandbox = await sandboxes.open(owner="agent-rl's tests", lifetime=120)
        try:
            await sandbox.run_python("x = 20")
            assert (await sandbox.run_python("x + 1")).value == "21"
            ran = await sandbox.exec(["sh", "-c", "id -un; setsid sleep 60 & sleep 60"], timeout=2)
            assert ran.timed_out and ran.stdout == "user\n"
            assert (await sandbox.exec(["pgrep", "-c", "sleep"])).stdout == "0\n"
            code = "import os\nos.system('id -un; setsid sleep 61 & sleep 61')"
            late = await sandbox.run_python(code, timeout=2)
            assert (late.timed_out, late.state_lost, late.stdout) == (True, True, "user\n")
            processes = (
                "[p for p in os.listdir('/proc') if p.isdigit() and b'61' in open(f'/proc/{p}/cmdline', 'rb').read()]"
            )
            assert (await sandbox.run_python(f"import os\n{processes}")).value == "[]"
            await sandbox.run_python("open('made', 'w').write(os.getcwd())")
            assert await sandbox.read_file("made") == b"/work"
            if interpreter == "jupyter":
                assert (await sandbox.run_python("import numpy\nnumpy.arange(3)")).value == "array([0, 1, 2])"
        finally:
            await sandboxes.close()

    asyncio.run(main())
