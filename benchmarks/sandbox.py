"""What a sandbox costs, beside a bare subprocess and others: `python benchmarks/sandbox.py`.

Times are wall-clock medians, so they say something on a quiet machine only; the load is printed. What is not installed
(bubblewrap, inspect_ai) is left out, and said so.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.local import LocalSandboxes

CALLS, COMMANDS, SPAWNS, IDLE = 5000, 200, 100, 16
SHARED = ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix)
BARS = {"stateful call, ms": 0.15, "spawn, ms": 20.0, "memory of an idle sandbox, MB": 4.0}
"""At most."""
MIN_RATE = 4000
"""Calls a second, at least, of one process."""


async def median(act: Callable[[], Awaitable[object]], count: int) -> float:
    """Return the median time of an act, in milliseconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        await act()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


async def local(tier: str) -> dict[str, float]:
    """Measure sandboxes of a kind."""
    sandboxes = LocalSandboxes(tier=tier, require=())
    box = await sandboxes.open()
    await box.run_python("x = 0")
    rows = {"stateful call, ms": await median(lambda: box.run_python("x += 1"), CALLS)}
    rows["command, ms"] = await median(lambda: box.exec(["/bin/true"]), COMMANDS)
    spawns, firsts = [], []
    for _ in range(SPAWNS):
        start = time.perf_counter()
        other = await sandboxes.open()
        spawned = time.perf_counter()
        await other.run_python("1")
        firsts.append(time.perf_counter() - start)
        spawns.append(spawned - start)
        await other.close()
    rows["spawn, ms"] = 1e3 * statistics.median(spawns)
    rows["spawn and first result, ms"] = 1e3 * statistics.median(firsts)
    before = _memory()
    idle = [await sandboxes.open() for _ in range(IDLE)]
    rows["memory of an idle sandbox, MB"] = (_memory() - before) / IDLE
    rows["calls a second, of 4 at once"] = await _rate(idle[:4])
    await sandboxes.close()
    return rows


async def _rate(boxes: list[Sandbox]) -> float:
    async def many(box: Sandbox) -> None:
        for _ in range(CALLS // 4):
            await box.run_python("1")

    await asyncio.gather(*(box.run_python("1") for box in boxes))
    start = time.perf_counter()
    await asyncio.gather(*map(many, boxes))
    return CALLS // 4 * len(boxes) / (time.perf_counter() - start)


def _memory() -> float:
    """Return the megabytes of this process and all below it, each page shared out among those who have it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0
    for pid in family:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
    return total / 1024


def command(argv: list[str]) -> Callable[[], Awaitable[object]]:
    """Return an act that runs a program to its end."""

    async def run() -> None:
        await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)

    return run


async def others() -> dict[str, float]:
    """Measure what one would take instead, for a command or a piece of Python."""
    python = [sys.executable, "-I", "-S", "-c", "pass"]
    rows = {"bare subprocess: true, ms": await median(command(["/bin/true"]), COMMANDS)}
    rows["bare subprocess: python, ms"] = await median(command(python), SPAWNS)
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        print("bubblewrap is not installed: left out")
    else:
        binds = [part for path in SHARED if Path(path).exists() for part in ("--ro-bind", path, path)]
        argv = [bwrap, *binds, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-all"]
        executable = str(Path(sys.executable).resolve())
        rows["bubblewrap: python, ms"] = await median(command([*argv, executable, *python[1:]]), SPAWNS)
    if importlib.util.find_spec("inspect_ai") is None:
        print("inspect_ai is not installed: left out")
    else:
        from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

        environment = LocalSandboxEnvironment()
        rows["inspect_ai local: true, ms"] = await median(lambda: environment.exec(["/bin/true"]), COMMANDS)
    return rows


async def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {'root' if os.geteuid() == 0 else 'a user'}")
    jail = await local("jail")
    for name, value in (jail | await others()).items():
        print(f"{name:36}{value:10.3f}")
    print(f"load {os.getloadavg()[0]:.1f}\n")
    for name, bar in BARS.items():
        print(f"{'PASS' if jail[name] <= bar else 'FAIL'}  {name}: {jail[name]:.3f} (at most {bar:g})")
    rate = jail["calls a second, of 4 at once"]
    print(f"{'PASS' if rate >= MIN_RATE else 'FAIL'}  calls a second: {rate:.0f} (at least {MIN_RATE})")


if __name__ == "__main__":
    asyncio.run(main())
