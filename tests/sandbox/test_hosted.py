"""The doors to Modal and Daytona, on doubles of their SDKs, whose calls fit the signatures of the real ones."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import operator
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_rl.core.sandbox_loss import Cause
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Limits, Sandbox
from agent_rl.sandboxes.client.hosted import LINE, Link, decode_input, encode_output, source_command
from agent_rl.sandboxes.registry import make_backend
from tests.sandbox.backends import BACKENDS, skip_if_refused
from tests.sandbox.hosted_doubles import Agent, Calls, GoneError, LateError, fake_daytona, fake_modal

DOUBLES = {"modal": fake_modal, "daytona": fake_daytona}
KEYS = {"modal": ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"), "daytona": ("DAYTONA_API_KEY",)}
Use = Callable[[Sandbox, Agent], Awaitable[None]]
each = pytest.mark.parametrize("name", DOUBLES)


def give_keys(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for key in KEYS[name]:
        monkeypatch.setenv(key, "of the tests")


def with_double(monkeypatch: pytest.MonkeyPatch, name: str, use: Use) -> Calls:
    """Use a sandbox of the double, and see that it is ended; return what its SDK was asked."""
    if BACKENDS["jail"].refused():
        pytest.skip("the kernel refuses jails, which the double's sandboxes are")
    calls: Calls = []
    agents: list[Agent] = []
    give_keys(monkeypatch, name)
    monkeypatch.setitem(sys.modules, name, DOUBLES[name](agents, calls))

    async def main() -> None:
        sandboxes = make_backend(name)
        with skip_if_refused():
            sandbox = await sandboxes.open(owner="the tests", limits=Limits(memory=256 << 20, cpus=2.0), lifetime=90)
        try:
            await use(sandbox, agents[0])
        finally:
            await sandboxes.close()
        assert not agents[0].runs

    asyncio.run(asyncio.wait_for(main(), 60))
    return calls


async def work(sandbox: Sandbox, agent: Agent) -> None:
    await sandbox.write_file("data", bytes(range(256)) * 1000)
    assert len(await sandbox.read_file("data")) == 256_000
    await sandbox.run_python("x = 20")
    assert (await sandbox.run_python("x + 1")).value == "21"
    late = await sandbox.exec(["sh", "-c", "echo so far; sleep 60"], timeout=0.2)
    assert (late.timed_out, late.stdout) == (True, "so far\n")


@pytest.mark.sandbox
@each
def test_hosted_sandbox_runs_code_and_keeps_files(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = with_double(monkeypatch, name, work)
    asked = {called: options for called, _, options in calls}
    if name == "modal":
        made = asked["Sandbox.create"]
        assert made["block_network"] and made["timeout"] == 90
        assert (made["memory"], made["cpu"]) == ((256, 256), (2.0, 2.0))
    else:
        made = asked["CreateSandboxFromSnapshotParams"]
        assert made["network_block_all"] and made["ttl_minutes"] == 2
        assert [called for called, _, _ in calls].count("close") == 1


@pytest.mark.sandbox
@each
@pytest.mark.parametrize(
    ("error", "runs", "cause"),
    [
        (LateError("late"), True, Cause.BACKEND_GONE),
        (LateError("late"), False, Cause.AGENT_ENDED),
        (GoneError("gone"), True, Cause.AGENT_ENDED),
    ],
    ids=["service", "ended", "unknown"],
)
def test_hosted_loss_counts_as_its_causer(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, runs: bool, cause: Cause
) -> None:
    async def use(sandbox: Sandbox, agent: Agent) -> None:
        await sandbox.run_python("1")
        agent.breaks, agent.runs = error, runs
        if cause is Cause.BACKEND_GONE:
            with pytest.raises(SandboxError, match="broke the connection off: LateError"):
                await sandbox.exec(["true"])
        else:
            assert (await sandbox.exec(["true"])).sandbox_lost
        assert sandbox.loss is not None and sandbox.loss.cause is cause

    with_double(monkeypatch, name, use)


@each
def test_hosted_backend_names_missing_key_and_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none"))
    for key in KEYS[name]:
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(ConfigError, match=KEYS[name][0]):
        make_backend(name)
    give_keys(monkeypatch, name)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'agent-rl\[{name}\]'"):
        make_backend(name)


def test_hosted_text_codecs_carry_every_byte(tmp_path: Path) -> None:
    data = bytes(range(256)) * 500
    pipeline = f"{source_command(encode_output)} | {source_command(decode_input)}"
    (tmp_path / "python3").symlink_to(sys.executable)  # the service's; this machine may have none of that name
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["sh", "-c", pipeline], input=data, capture_output=True, timeout=60, env=path)
    assert (ran.stdout, ran.stderr) == (data, b"")


def test_hosted_line_is_bounded() -> None:
    """Code that is root there can write beside the agent, without an end of line."""

    class Idle(Link):
        async def _idle(self, *about: object) -> None: ...

        _start = _write = _wait = _terminate = _runs = _idle  # type: ignore[assignment]

        def _tells_of_the_end(self, error: Exception) -> bool:
            return False

    async def main() -> None:
        link = Idle("a service")
        await link._receive_text("A" * LINE)
        with pytest.raises(ValueError, match="which no agent writes"):
            await link._receive_text("A")
        link.ours.close()
        link._theirs.close()

    asyncio.run(main())


@each
def test_hosted_calls_fit_the_real_sdk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sdk = pytest.importorskip(name, reason=f"the double of {name} is not compared with its SDK: it is not installed")
    calls = with_double(monkeypatch, name, work)
    monkeypatch.setitem(sys.modules, name, sdk)
    assert len({called for called, _, _ in calls}) >= 4
    for called, args, options in calls:
        inspect.signature(real(sdk, called)).bind(*args, **options)
    if name == "modal":
        exception = importlib.import_module("modal.exception")
        assert exception.NotFoundError and exception.SandboxTerminatedError and exception.SandboxTimeoutError
        assert sdk.stream_type.StreamType.DEVNULL
    else:
        assert sdk.SandboxState.STARTED == "started" and sdk.DaytonaNotFoundError and sdk.DaytonaGoneError


def real(sdk: Any, called: str) -> Any:
    """Return a function of the real SDK."""
    if called.startswith("process."):
        return operator.attrgetter(called.replace("process.", "AsyncProcess."))(sdk._async.process)
    if called.startswith("fs."):
        return operator.attrgetter(called.replace("fs.", "AsyncFileSystem."))(sdk._async.filesystem)
    if called == "refresh_data":
        return sdk.AsyncSandbox.refresh_data
    return operator.attrgetter(called if called[0].isupper() else f"AsyncDaytona.{called}")(sdk)
