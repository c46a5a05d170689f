"""Every attack on every backend: its aim, the agent, the trainer's event loop, the end, and the host; and its twin.

The twin is the same code unprotected, where it must succeed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_rl.sandboxes.base import Sandbox, Sandboxes
from agent_rl.sandboxes.calls import PythonResult
from benchmarks.sandbox_soak import seconds_waited
from tests.sandbox.attacks import ON_THE_HOST, Attack
from tests.sandbox.attacks_unlisted import UNLISTED
from tests.sandbox.attacks_within import ON_RESOURCES, ON_THE_KERNEL
from tests.sandbox.backends import E2B_ADDRESS, Backend
from tests.sandbox.test_sabotage import works
from tests.sandbox.victims import definitions, unprotected, victims

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks' system calls are x86_64's")
GAP, CLOSE = 0.05, 1.0
"""Seconds for which the event loop may stand still, the waiting for a processor left out; and of closing a sandbox."""
ATTACKS = [*ON_THE_HOST, *ON_THE_KERNEL, *ON_RESOURCES, *UNLISTED]
ALONE = [*ON_RESOURCES, *UNLISTED]
"""Those that take a sandbox of their own on a server, too, where one takes seconds; as do those that may end one."""
MOVES = re.compile(
    r"/random/|/ns_last_pid$|/(dentry|inode)-|/file-nr$|/pty/nr$|/quota/syncs$|_max_sample_rate$|/(conf|neigh)/"
)
"""What moves by itself, or by whatever else the machine does."""
ABSENT = {f"False {errno.ENOSYS}", f"False {errno.EAFNOSUPPORT}", "failed with -11: "}
by_name = pytest.mark.parametrize(
    "attack",
    [pytest.param(each, id=each.name, marks=[pytest.mark.sandbox] * (each in UNLISTED)) for each in ATTACKS],
)


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
    """Return what no sandbox may change: of this process, and of the machine all settings and counts of the kernel."""
    files = (file for name in ("kernel", "vm", "fs", "net") for file in Path("/proc/sys", name).rglob("*"))
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "priority": (os.nice(0), os.sched_getscheduler(0), os.sched_getaffinity(0)),
        "odds": Path("/proc/self/oom_score_adj").read_text(),
        "modules": {folder.name for folder in Path("/sys/module").iterdir()},
        **{str(file): _text(file) for file in files if not MOVES.search(str(file)) and file.is_file()},
    }


def _text(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:  # it can only be written to
        return None


@pytest.fixture(scope="module")
def shared_box(sandboxes: Sandboxes, runner: asyncio.Runner) -> Iterator[Sandbox]:
    opened = runner.run(sandboxes.open(owner="attacks", lifetime=3600.0))
    yield opened
    runner.run(opened.close())


@pytest.fixture
def shared(attack: Attack, backend: Backend, request: pytest.FixtureRequest) -> Sandbox | None:
    """The sandbox of all attacks that use up nothing of it, on a server; None if this one takes its own."""
    is_shared = backend.needs is not None and attack not in ALONE and not attack.fatal
    return request.getfixturevalue("shared_box") if is_shared else None


@by_name
def test_sandbox_withstands_the_attack(
    attack: Attack, backend: Backend, sandboxes: Sandboxes, capabilities, shared: Sandbox | None, run
):
    if capabilities[attack.guarantee] is None:
        pytest.skip(f"{backend.name} does not guarantee {attack.guarantee} here, and says so")
    if backend.needs == E2B_ADDRESS and attack in UNLISTED:
        pytest.skip(f"{backend.name}: the stand-in's sandboxes are jails, which withstand these")
    host, gaps, closes = of_the_host(), [GAP], [CLOSE]
    while len(gaps) < 4 and (min(gaps) >= GAP or min(closes) >= CLOSE):  # what else the machine does may take that long
        box = shared or run(sandboxes.open(owner=attack.name, lifetime=120))
        with victims(backend.uid) as aims:
            code = definitions(aims.names) + attack.code + "\nbool(reached)"
            result, gap = run(longest_gap(box.run_python(code, timeout=20)))
            if not (attack.fatal and result.state_lost):
                assert (result.value, result.error) == ("False", None)
            assert aims.harmed() == []
        gaps.append(gap)
        assert not result.sandbox_lost and works(run, box)
        closes.append(0.0 if box is shared else run(closing(box)))
    assert min(gaps) < GAP and min(closes) < CLOSE, (gaps, closes)
    changed = {name for name, value in of_the_host().items() if value != host[name]}
    assert changed <= ({"descriptors"} if backend.needs == E2B_ADDRESS else set())  # its client keeps connections


@pytest.mark.sandbox
@by_name
def test_twin_succeeds_unprotected(attack: Attack, tmp_path: Path):
    if attack.root and os.geteuid() != 0:
        pytest.skip("needs root: this test is not")
    if attack.name == "change the agent's share of its session" and not Path("/proc/self/autogroup").read_text():
        pytest.skip("this session has no share of its own here, so that the attack proves nothing")
    with victims(None) as aims:
        said = unprotected(attack.code, aims.names, tmp_path)
    subprocess.run(["rm", "-rf", "--", *tmp_path.iterdir()], check=True)  # may be too deep for pytest's own cleaning
    if said in ABSENT:
        pytest.skip(f"this kernel lacks what is attacked, so that the attacks prove nothing: {said}")
    if attack.root and attack not in UNLISTED and said == f"False {errno.EPERM}":
        pytest.skip(f"root may not do that here, so that the attack proves nothing: {said}")
    assert said.startswith("True"), said


def test_attacks_number_at_least_147():
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names)) >= 61 + 56 + 30
