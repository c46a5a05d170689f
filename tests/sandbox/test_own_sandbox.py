"""A user's own backend: registered from a file, checked by the public contract, used by an environment."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tree import ROOT

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.sandboxes.base import Capabilities, Guarantee
from agent_rl.sandboxes.registry import SANDBOXES, make_backend, shared_backend
from agent_rl.testing import FakeSandboxes, check_sandboxes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs Linux")
EXAMPLE = ROOT / "examples" / "own_sandbox.py"


@pytest.mark.sandbox
def test_example_keeps_the_contract(run):
    ar.load_file(EXAMPLE)

    async def check() -> object:
        sandboxes = make_backend("subprocess", {"python": sys.executable})
        try:
            return await check_sandboxes(sandboxes)
        finally:
            await sandboxes.close()

    assert run(check()) == {}


def test_example_runs_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["rollout", "--import", str(EXAMPLE), "env=python-v0", "env_args.sandbox=subprocess", "policy=oracle"]
    assert main([*arguments, "n=4", "split=dev", f"out={tmp_path}"]) == 0
    assert "100" in capsys.readouterr().out


def test_make_backend_corrects_a_misspelt_registered_name():
    ar.load_file(EXAMPLE)
    with pytest.raises(ar.ConfigError, match="Did you mean 'subprocess'"):
        make_backend("subproces")
    with pytest.raises(ar.ConfigError, match="It takes: python, warm, most"):
        make_backend("subprocess", {"pithon": "x"})


def test_register_sandbox_refuses_a_taken_name():
    @ar.register_sandbox("recorded")
    def recorded(answer: str = "") -> FakeSandboxes:
        return FakeSandboxes()

    assert isinstance(make_backend("recorded", {"answer": "x"}), FakeSandboxes)
    assert "recorded" in SANDBOXES.names()
    with pytest.raises(ar.NameCollisionError, match="'recorded' is registered twice"):
        ar.register_sandbox("recorded")(FakeSandboxes)


def test_shared_backend_is_one_for_threads_that_begin_at_once():
    both = threading.Barrier(2, timeout=10)

    @ar.register_sandbox("slow-to-make")
    def slow() -> FakeSandboxes:
        both.wait()
        return FakeSandboxes()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(shared_backend, ["slow-to-make"] * 2)
    assert first is second


class Boasting(FakeSandboxes):
    """Runs nothing, and claims everything."""

    async def capabilities(self) -> Capabilities:
        return dict.fromkeys(Guarantee, "trust me")


def test_check_sandboxes_finds_broken_promises(run):
    failures = run(check_sandboxes(Boasting()))
    assert "BrokenContractError" in failures["command_has_a_status_and_two_outputs"]
    assert "its canary broke it" in failures[Guarantee.KILL_ALL]
    assert "files_come_back_as_they_went" in failures and "closed_sandbox_says_so" not in failures
