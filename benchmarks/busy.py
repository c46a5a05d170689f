"""A short training beside other work: `python benchmarks/busy.py`.

The same run by itself and beside four endless loops, by turns, on the first two cores of this process. A run of one
thread beside four loops gets two fifths of a core, so the least ratio of the wall clock is 2.5. Printed are each run's
wall and CPU time and the machine's load before it, then the medians' ratios; exit status 1 if one is above its bar.
"By itself" it is on a machine without other work only: the ratio of the wall clock means something at loads near 0.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CORES, LOOPS = 2, 4
MOST_WALL, MOST_CPU = 3.5, 1.15
SHORT = (
    *("steps=6", "eval.n=32", "eval.dev_n=16", "eval.every=0", "warm_start.demonstrations=300"),
    *("warm_start.copy_steps=5", "warm_start.clone_steps=40"),
)
"""About 20 CPU-s."""


@contextmanager
def loops(n: int) -> Iterator[None]:
    """Have endless loops beside."""
    loop_of = "import os\nrun = os.getppid()\nwhile os.getppid() == run: pass"  # they end with this process, too
    running = [subprocess.Popen([sys.executable, "-c", loop_of]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in running:
            loop.kill()
            loop.wait()  # here, so that its time counts before the next run's


def train(settings: Sequence[str]) -> tuple[float, float]:
    """Run a training; return its seconds by the wall clock, and of CPU time, its own processes' included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agent_rl", "train", f"runs_dir={folder}", *settings]
        started = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    """Measure, print, compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", help="more settings of the run, such as threads=2 or processes=2")
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    os.environ.pop("OMP_NUM_THREADS", None)
    taken = dict[int, list[tuple[float, float]]]()
    for _ in range(arguments.times):
        for n in (0, LOOPS):
            load = os.getloadavg()[0]
            with loops(n):
                wall, cpu = train((*SHORT, *arguments.settings))
            taken.setdefault(n, []).append((wall, cpu))
            print(f"beside {n} loops: {wall:6.1f} s, {cpu:6.1f} CPU-s; load before it {load:.1f}", flush=True)
    (wall, cpu), (wall_busy, cpu_busy) = (
        [statistics.median(each) for each in zip(*taken[n], strict=True)] for n in (0, LOOPS)
    )
    print(f"wall {wall_busy / wall:.2f} x (at most {MOST_WALL}), CPU {cpu_busy / cpu:.2f} x (at most {MOST_CPU})")
    return int(wall_busy > MOST_WALL * wall or cpu_busy > MOST_CPU * cpu)


if __name__ == "__main__":
    sys.exit(main())
