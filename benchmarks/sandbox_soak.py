"""What hostile sandboxes do to the trainer and to honest ones beside them: `python benchmarks/sandbox_soak.py`.

In one event loop, 16 honest sandboxes make calls of some 20 µs of work, each with a rest of 20 ms after it. Beside them
are 16 others, which in turn do nothing, compute without end, or attack: each of `ATTACKS` until its call's timeout of a
second, in a new sandbox when the last one was lost. A gap is by how much the event loop is late for a timer of 5 ms.

The bars: the 99th percentile of the gaps is at most 20 ms, and the median call beside attackers takes less than twice
as long as beside sandboxes that compute, which have the same share of the processors: what beside those it takes more
than beside none is the price of sharing, which no isolation lowers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent_rl.sandboxes.base import Limits, Sandbox, Sandboxes
from agent_rl.sandboxes.local.backend import LocalSandboxes

GAP, SLOWDOWN = 20.0, 2.0
"""The bars: milliseconds, and times."""
BEAT, REST, TIMEOUT = 0.005, 0.02, 1.0
"""Seconds: of the timer, after an honest call, and of a neighbour's call."""
LIMITS = Limits(memory=128 << 20, processes=32, disk=8 << 20, files=512)
HONEST = "sum(range(1000))"
COMPUTE = "while True: pass"
_FRAME = "import os, struct\ndef frame(head): return struct.pack('>II', len(head), 0) + head\n"
_SPIN = "for _ in range(30):\n    try:\n        if os.fork() == 0: break\n    except OSError: pass\nwhile True: pass"
ATTACKS: Mapping[str, str] = {
    "forged answers": _FRAME + "block = frame(b'{\"id\": 0}') * 3000\nwhile True: os.write(3, block)",
    "the least frames": _FRAME + "block = frame(b'{}') * 6000\nwhile True: os.write(3, block)",
    "deep frames": _FRAME + "os.write(3, frame(b'[' * 100_000))\nwhile True: pass",
    "large frames": _FRAME + "os.write(3, frame(b'[' + b'[],' * 400_000 + b'[]]'))\nwhile True: pass",
    "bytes one by one": _FRAME + "os.write(3, struct.pack('>II', 0, 700_000))\nwhile True: os.write(3, b' ')",
    "output without end": "import os\nwhile True: os.write(1, bytes(65536)); os.write(2, bytes(65536))",
    "output that is no text": "import os\nfor fd in (1, 2): os.write(fd, b'\\xff' * 65536)",
    "a large value": "'\\u20ac' * 10_000_000",
    "output of threads between calls": (
        "import os, threading\ndef flood(fd):\n    while True: os.write(fd, bytes(65536))\n"
        "for fd in (1, 2): threading.Thread(target=flood, args=(fd,), daemon=True).start()\n"
    ),
    "processes that compute": "import os\n" + _SPIN,
    "processes of sessions of their own": "import os\n" + _SPIN.replace("== 0: break", "== 0: os.setsid(); break"),
    "processes that fork": "import os\nwhile True:\n    try: os.fork() and os._exit(0)\n    except OSError: pass",
    "all memory": "x = [bytearray(1 << 20) for _ in range(10_000)]",
    "writing out": "import os\nfd = os.open('/bin/sh', 0)\nwhile True: os.sync(); os.fsync(fd)",
    "a folder full of files": "for i in range(1000): open(str(i), 'w').write('x' * 10_000)",
    "the agent's priority": (
        "import os, resource\nfor pid in (1, os.getppid()):\n"
        "    for attack in (lambda: os.sched_setscheduler(pid, 5, os.sched_param(0)),\n"
        "                   lambda: resource.prlimit(pid, 7, (0, 0)), lambda: os.kill(pid, 9)):\n"
        "        try: attack()\n        except OSError: pass\nwhile True: pass"
    ),
}


@dataclass
class Soak:
    """What was measured, in milliseconds."""

    gaps: list[float] = field(default_factory=list)
    """By how much the event loop was late."""
    own: list[float] = field(default_factory=list)
    """The same without what its thread waited for a processor, as the kernel counts that."""
    busy: list[float] = field(default_factory=list)
    """The processor time of the event loop's thread from beat to beat."""
    calls: list[float] = field(default_factory=list)
    """Of the honest sandboxes."""
    lost: int = 0
    """How many of the neighbours' sandboxes were lost."""

    def row(self, name: str) -> str:
        """Return a line of the table."""
        times = percentile(self.gaps, 99), max(self.gaps), percentile(self.own, 99), max(self.own)
        times += percentile(self.busy, 99), statistics.median(self.calls)
        cells = "".join(f"{value:>10.2f}" for value in (*times, percentile(self.calls, 99)))
        return f"{name:<22}{cells}{len(self.calls):>10}{self.lost:>10}"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def soak(sandboxes: Sandboxes, neighbours: Sequence[str], honest: int, seconds: float) -> Soak:
    """Run honest sandboxes beside others.

    Args:
        sandboxes: where they come from.
        neighbours: the code of each; "": nothing runs in it.
        honest: how many there are.
        seconds: for how long, once all are open.
    """
    found = Soak()
    boxes = [await sandboxes.open(owner="honest", limits=LIMITS) for _ in range(honest)]
    others = [await sandboxes.open(owner="neighbour", limits=LIMITS) for _ in neighbours]
    for box in boxes:
        await box.run_python(HONEST)
    end = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_beat(found, end))
        for box in boxes:
            tasks.create_task(_call(found, box, end))
        for box, code in zip(others, neighbours, strict=True):
            tasks.create_task(_attack(found, sandboxes, box, code, end))
    for box in boxes:
        await box.close()
    return found


def seconds_waited() -> float:
    """Return for how many seconds this thread was ready to run and had no processor (/proc/PID/schedstat)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


async def _beat(found: Soak, end: float) -> None:
    while time.perf_counter() < end:
        start, used, waited = time.perf_counter(), time.thread_time(), seconds_waited()
        await asyncio.sleep(BEAT)
        late = time.perf_counter() - start - BEAT
        found.gaps.append(1e3 * late)
        found.own.append(1e3 * max(0.0, late - (seconds_waited() - waited)))
        found.busy.append(1e3 * (time.thread_time() - used))


async def _call(found: Soak, box: Sandbox, end: float) -> None:
    while time.perf_counter() < end:
        start = time.perf_counter()
        result = await box.run_python(HONEST)
        if result.value != str(sum(range(1000))):
            raise RuntimeError(f"an honest call came out as {result}")
        found.calls.append(1e3 * (time.perf_counter() - start))
        await asyncio.sleep(REST)


async def _attack(found: Soak, sandboxes: Sandboxes, box: Sandbox, code: str, end: float) -> None:
    while code and (left := end - time.perf_counter()) > 0:
        result = await box.run_python(code, timeout=min(TIMEOUT, max(left, 0.1)))
        if result.sandbox_lost:
            found.lost += 1
            await box.close()
            box = await sandboxes.open(owner="neighbour", limits=LIMITS)
        await asyncio.sleep(REST)
    await box.close()


def python_of(tier: str) -> str | None:
    """Return the interpreter for a tier: the system's for Landlock, which can't read a private one."""
    return shutil.which("python3", path=os.defpath) if tier == "landlock" else None


async def measure(sandboxes: Sandboxes, count: int, seconds: float) -> dict[str, Soak]:
    """Return what is found beside each kind of neighbours, `count` of each and of honest ones."""
    attacks = [code for code, _ in zip(itertools.cycle(ATTACKS.values()), range(count))]
    kinds = {"that do nothing": [""] * count, "that compute": [COMPUTE] * count, "that attack": attacks}
    return {name: await soak(sandboxes, codes, count, seconds) for name, codes in kinds.items()}


async def _main(count: int, seconds: float, tier: str) -> bool:
    sandboxes = LocalSandboxes(tier=tier, python=python_of(tier))
    try:
        found = await measure(sandboxes, count, seconds)
    finally:
        await sandboxes.close()
    print(f"{count} honest sandboxes beside {count}, {seconds:g} s each, {tier}; milliseconds")
    columns = ("gap p99", "gap max", "own p99", "own max", "busy p99", "call p50", "call p99", "calls", "lost")
    print(f"{'':<22}{''.join(f'{column:>10}' for column in columns)}")
    for name, soaked in found.items():
        print(soaked.row(name))
    gap = percentile(found["that attack"].gaps, 99)
    slowdown = statistics.median(found["that attack"].calls) / statistics.median(found["that compute"].calls)
    print(f"{'PASS' if gap <= GAP else 'FAIL'}  gap p99: at most {GAP:g} ms; it is {gap:.1f}")
    print(f"{'PASS' if slowdown < SLOWDOWN else 'FAIL'}  slower: less than {SLOWDOWN:g} times; it is {slowdown:.2f}")
    return gap <= GAP and slowdown < SLOWDOWN


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tier", default="jail", choices=("jail", "landlock"))
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    return not asyncio.run(_main(args.count, args.seconds, args.tier))


if __name__ == "__main__":
    sys.exit(main())
