"""Every attack on every backend, and its twin: the same code unprotected, where it must succeed."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.sandboxes.base import Sandbox, Sandboxes
from tests.sandbox.attacks import ON_THE_HOST, Attack
from tests.sandbox.attacks_within import ON_RESOURCES, ON_THE_KERNEL
from tests.sandbox.backends import Backend
from tests.sandbox.victims import definitions, unprotected, victims

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks' system calls are x86_64's")
ATTACKS = [*ON_THE_HOST, *ON_THE_KERNEL, *ON_RESOURCES]
ABSENT = {f"False {errno.ENOSYS}", f"False {errno.EAFNOSUPPORT}", "failed with -11: "}
by_name = pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])


@pytest.fixture(scope="module")
def shared_box(sandboxes: Sandboxes, runner: asyncio.Runner) -> Iterator[Sandbox]:
    opened = runner.run(sandboxes.open(owner="attacks", lifetime=3600.0))
    yield opened
    runner.run(opened.close())


@pytest.fixture
def aim(attack: Attack, backend: Backend, request: pytest.FixtureRequest) -> Sandbox:
    """A new sandbox; on a server, where one takes seconds, one for all attacks that use up nothing of it."""
    is_shared = backend.needs is not None and attack not in ON_RESOURCES and not attack.fatal
    return request.getfixturevalue("shared_box" if is_shared else "box")


@by_name
def test_sandbox_blocks_the_attack(
    attack: Attack, backend: Backend, sandboxes: Sandboxes, capabilities, aim: Sandbox, run
):
    if capabilities[attack.guarantee] is None:
        pytest.skip(f"{backend.name} does not guarantee {attack.guarantee} here, and says so")
    with victims(backend.uid) as aims:
        result = run(aim.run_python(definitions(aims.names) + attack.code + "\nbool(reached)", timeout=20))
        if not (attack.fatal and result.state_lost):
            assert (result.value, result.error) == ("False", None)
        assert aims.harmed() == []
    result = run(aim.run_python("1 + 1"))
    assert (result.value, result.error) == ("2", None), "the sandbox should still work"


def said_by_twin(attack: Attack, folder: Path) -> str:
    """Return what an attack prints without a sandbox; skip where it can't be tried."""
    if attack.root and os.geteuid() != 0:
        pytest.skip("needs root: this test is not")
    with victims(None) as aims:
        said = unprotected(attack.code, aims.names, folder)
    subprocess.run(["rm", "-rf", "--", *folder.iterdir()], check=True)  # may be too deep for pytest's own cleaning
    if said in ABSENT:
        pytest.skip(f"this kernel lacks what is attacked, so that the attacks prove nothing: {said}")
    return said


@pytest.mark.sandbox
@by_name
def test_twin_succeeds_unprotected(attack: Attack, tmp_path: Path):
    said = said_by_twin(attack, tmp_path)
    if attack.root and said == f"False {errno.EPERM}":
        pytest.skip(f"root may not do that here, so that the attack proves nothing: {said}")
    assert said.startswith("True"), said


def test_attacks_number_at_least_60():
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names)) >= 60
