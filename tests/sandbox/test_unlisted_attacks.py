"""Attacks that no list had, each on a sandbox of its own: besides its aim, what it does to the agent and the host."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_rl.sandboxes.base import PythonResult, Sandbox, Sandboxes
from benchmarks.sandbox_soak import seconds_waited
from tests.sandbox.attacks import Attack
from tests.sandbox.attacks_unlisted import UNLISTED
from tests.sandbox.backends import Backend
from tests.sandbox.test_attacks import said_by_twin
from tests.sandbox.test_sabotage import works
from tests.sandbox.victims import definitions, victims

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks' system calls are x86_64's"),
]
GAP, CLOSE = 0.05, 1.0
"""Seconds for which the event loop may stand still, the waiting for a processor left out; and of closing a sandbox."""
by_name = pytest.mark.parametrize("attack", UNLISTED, ids=[attack.name for attack in UNLISTED])


async def longest_gap(call: Coroutine[Any, Any, PythonResult]) -> tuple[PythonResult, float]:
    """Return what a call returns, and the longest time for which the event loop did not turn meanwhile."""
    calling, longest = asyncio.ensure_future(call), 0.0
    while not calling.done():
        start, before = time.perf_counter(), seconds_waited()
        await asyncio.sleep(0.002)
        longest = max(longest, time.perf_counter() - start - 0.002 - (seconds_waited() - before))
    return await calling, longest


async def closing(box: Sandbox) -> float:
    start = time.perf_counter()
    await box.close()
    return time.perf_counter() - start


def of_the_host() -> dict[str, object]:
    """Return what no sandbox may change: of this process, and of the machine."""
    settings = ("kernel/core_pattern", "kernel/pid_max", "kernel/panic", "fs/file-max", "vm/overcommit_memory")
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "priority": (os.nice(0), os.sched_getscheduler(0), os.sched_getaffinity(0)),
        "odds": Path("/proc/self/oom_score_adj").read_text(),
        **{name: Path("/proc/sys", name).read_text() for name in settings},
    }


@pytest.fixture(scope="module")
def usual(sandboxes: Sandboxes, runner: asyncio.Runner) -> float:
    """How long it takes to close a sandbox that has done nothing."""
    runner.run(runner.run(sandboxes.open()).close())
    return runner.run(closing(runner.run(sandboxes.open())))


@pytest.fixture
def unchanged(usual: float) -> Iterator[None]:
    before = of_the_host()
    yield
    assert of_the_host() == before


@by_name
def test_sandbox_withstands_the_attack(
    attack: Attack, backend: Backend, sandboxes: Sandboxes, capabilities, run, usual: float, unchanged
):
    if capabilities[attack.guarantee] is None:
        pytest.skip(f"{backend.name} does not guarantee {attack.guarantee} here, and says so")
    gaps = []
    for _ in range(3):  # another process may have the loop wait for a page, or a lock of the kernel's
        box = run(sandboxes.open(owner=attack.name, lifetime=120))
        with victims(backend.uid) as aims:
            code = definitions(aims.names) + attack.code + "\nbool(reached)"
            result, gap = run(longest_gap(box.run_python(code, timeout=20)))
            if not (attack.fatal and result.state_lost):
                assert (result.value, result.error) == ("False", None)
            assert aims.harmed() == []
        assert not result.sandbox_lost and works(run, box)
        assert run(closing(box)) < CLOSE + 20 * usual
        gaps.append(gap)
        if gap < GAP:
            break
    assert min(gaps) < GAP


@by_name
def test_unlisted_twin_succeeds_unprotected(attack: Attack, tmp_path: Path):
    if attack.name == "change the agent's share of its session" and not Path("/proc/self/autogroup").read_text():
        pytest.skip("this session has no share of its own here, so that the attack proves nothing")
    said = said_by_twin(attack, tmp_path)
    assert said.startswith("True"), said
