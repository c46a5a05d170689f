"""The watchdog over memory without a cgroup: its kills, and its cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Guarantee, Sandbox, Sandboxes
from tests.sandbox.backends import BACKENDS
from tests.sandbox.test_local import descendants

pytestmark = pytest.mark.sandbox

TAKE = """
import os, time
def take(size):
    block = bytearray(size << 20)
    for i in range(0, len(block), 4096): block[i] = 1
    return block
def fork(count, size):
    for _ in range(count):
        if os.fork() == 0:
            block = take(size)
            time.sleep(60)
            os._exit(0)
"""


@pytest.fixture(scope="module", params=["jail-unprivileged", "landlock-unprivileged"])
def watched(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Sandboxes]:
    made = BACKENDS[request.param].make()
    try:
        found = runner.run(made.capabilities())
    except SandboxError as error:
        pytest.skip(f"{request.param}: the kernel refuses: {error}")
    assert found[Guarantee.MEMORY] == "RSS watchdog, best effort"
    yield made
    runner.run(made.close())


@pytest.fixture
def box(watched: Sandboxes, runner: asyncio.Runner) -> Iterator[Sandbox]:
    """A sandbox that may have 192 MiB."""
    opened = runner.run(watched.open(lifetime=60))
    yield opened
    runner.run(opened.close())


def test_watchdog_kills_an_oversized_interpreter(box: Sandbox, run):
    result = run(box.run_python(TAKE + "print('so far', flush=True)\nfork(5, 60)\ntime.sleep(15)"))
    assert (result.state_lost, result.timed_out, result.stdout) == (True, False, "so far\n")
    assert "out of memory" in result.error
    assert result.seconds < 10
    assert run(box.run_python("1 + 1")).value == "2"


def test_sandbox_survives_a_memory_bomb_of_segments(box: Sandbox, run):
    take = "import ctypes, time\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"
    take += "for _ in range(10):\n    segment = libc.shmget(0, 30 << 20, 0o1600)\n    if segment < 0: break\n"
    take += "    where = ctypes.c_void_p(libc.shmat(segment, None, 0))\n"
    take += "    ctypes.memset(where, 1, 30 << 20), libc.shmdt(where)\n"
    run(box.run_python(f"{take}time.sleep(1)"))
    assert run(box.run_python("import time\ntime.sleep(0.5)\n'alive'")).value == "'alive'"


@pytest.mark.parametrize("used_before", [False, True])
def test_watchdog_sees_memory_after_a_rest(box: Sandbox, run, used_before: bool):
    if used_before:
        run(box.run_python("x = 1"))
    time.sleep(3)
    result = run(box.run_python(TAKE + "fork(5, 60)\ntime.sleep(15)"))
    assert result.state_lost


def test_watchdog_kills_an_oversized_command(box: Sandbox, run):
    run(box.write_file("bomb.py", f"{TAKE}fork(5, 60)\ntime.sleep(15)".encode()))
    ran = run(box.exec(["python3", "bomb.py"], timeout=20))
    assert (ran.returncode, ran.timed_out) == (-9, False)


def private_bytes() -> int:
    """The memory of all descendants of this process that no file backs, in bytes."""
    pages = 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            pages += resident - shared
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_watchdog_ends_800_mib_over_8_processes_within_a_second(box: Sandbox, run):
    """As the host sees it, by looks of 10 ms, which a busy machine slows as it does the watchdog."""
    before, ended, above = private_bytes(), threading.Event(), list[int]()

    def look() -> None:
        while not ended.wait(0.005):
            if (held := private_bytes() - before) > 192 << 20:
                above.append(held)

    looking = threading.Thread(target=look)
    looking.start()
    result = run(box.run_python(f"{TAKE}fork(8, 100)\ntime.sleep(15)"))
    ended.set()
    looking.join()
    assert result.state_lost and not result.timed_out
    assert len(above) <= 100, f"{max(above) >> 20} MiB"


def test_watchdog_counts_shared_memory_once(box: Sandbox, run):
    """Eight times 100 MiB that are all the same: no more than one."""
    code = f"{TAKE}block = take(100)\nfork(7, 1)\ntime.sleep(1.5)\nlen(block) >> 20"
    assert run(box.run_python(code)).value == "100"


def test_watchdog_spares_sandboxes_within_the_limit(box: Sandbox, run):
    assert run(box.run_python(f"{TAKE}fork(2, 60)\ntime.sleep(1)\n'alive'")).value == "'alive'"


def test_watchdog_survives_a_signal_flood(box: Sandbox, run):
    flood = "for _ in range(100_000):\n    for pid in (1, os.getppid()):\n        try: os.kill(pid, 14)\n"
    code = f"{TAKE}{flood}        except OSError: pass\n'alive'"
    assert run(box.run_python(code)).value == "'alive'"
    assert run(box.run_python(f"{TAKE}fork(5, 60)\ntime.sleep(15)")).state_lost


def turns(pids: set[int]) -> int:
    """The number of times these processes were scheduled; one that has ended no longer is."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            found += int(Path(f"/proc/{pid}/schedstat").read_text().split()[2])
    return found


def test_watchdog_sleeps_while_the_sandbox_waits(watched: Sandboxes, run):
    before = descendants(os.getpid())
    box = run(watched.open(lifetime=60))
    run(box.run_python("x = 1"))
    pids = descendants(os.getpid()) - before
    assert len(pids) >= 2, "the agent and the interpreter"
    took, until = 6, time.monotonic() + 20
    while took > 5 and time.monotonic() < until:  # a busy machine takes a while to let them come to rest
        first = turns(pids)
        time.sleep(1)
        took = turns(pids) - first
    assert took <= 5, "while a process computes, it looks twenty times a second"
    run(box.close())


def test_jail_keeps_no_landlock_rules_of_code(box: Sandbox, watched: Sandboxes, run):
    """They are memory of the kernel, which the watchdog does not see; where Landlock itself confines, they remain."""
    code = "import ctypes\nscopes = (ctypes.c_ulong * 1)(1)\nctypes.CDLL(None).syscall(444, scopes, 8, 0) >= 0"
    assert run(box.run_python(code)).value == str(run(watched.capabilities())[Guarantee.FILES] == "Landlock")
