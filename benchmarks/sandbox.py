"""What a sandbox costs, beside what one would take instead: `python benchmarks/sandbox.py`.

Every contestant does the same, for three seconds each (nine times at least): it evaluates `6 * 7` in Python, and the
answer is checked; it runs `true`. Peers that keep no state start a Python for each call, as bare as ours (`-I -S`).

Times are medians of wall-clock time, so they say something on a quiet machine only; the load is printed. A call needs
two wake-ups of another process, so the time of one byte there and back stands in the table, too. Memory counts each
page shared out among those who have it. What is not installed is left out, and said so. The containers' engine is that
of $DOCKER_HOST, or of Docker's own socket; as root, with dockerd and neither of them, one is started for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from sandbox_measures import METERS, Contestant, NotHereError, round_trip
from sandbox_ours import docker, docker_warm, engine, local
from sandbox_peers import bubblewrap, docker_exec, inspect_docker, inspect_local, processes, worker
from sandbox_table import Bar, Measure, Row, table, verdicts

JAIL, DOCKER = "agent_rl jail", "agent_rl docker"
Contestants = Mapping[str, Callable[[], AbstractAsyncContextManager[Contestant[Any]]]]
LOCAL: Contestants = {
    JAIL: partial(local, "jail"),
    "agent_rl landlock": partial(local, "landlock"),
    "Python worker on pipes, no isolation": partial(worker, JAIL),
    "bare subprocess, no isolation": partial(processes, JAIL),
    "bubblewrap": partial(bubblewrap, JAIL),
    "inspect_ai local, no isolation": partial(inspect_local, JAIL),
}
ON_DOCKER: Contestants = {
    DOCKER: docker,
    "agent_rl docker, from a WarmPool": docker_warm,
    "docker run, docker exec": partial(docker_exec, DOCKER),
    "inspect_ai docker": partial(inspect_docker, DOCKER),
}
BARS = (
    Bar(Measure.CALL, JAIL, 0.15),
    Bar(Measure.OPEN, JAIL, 20.0),
    Bar(Measure.IDLE, JAIL, 4.0),
    Bar(Measure.RATE, JAIL, 4000.0),
    Bar(Measure.CALL, DOCKER, 1.0),
)
PER_CALL = frozenset({Measure.CALL, Measure.RATE})


async def figures(contestants: Contestants) -> list[Row]:
    """Measure those that can be had here; say which can't, and why."""
    rows = []
    for name, make in contestants.items():
        print(f"measuring {name}", file=sys.stderr)
        try:
            async with make() as contestant:
                for measure in (measure for measure in METERS if measure in contestant.measures):
                    shown = f"{name}: python -c, keeps no state" if _forgets(contestant, measure) else name
                    try:
                        value = await METERS[measure](contestant)
                    except NotHereError as reason:
                        print(f"LEFT OUT  {name}, {measure}: {reason}")
                    else:
                        rows.append(Row(measure, shown, value, contestant.beside))
        except Exception as error:  # whatever other people's code raises, the rest is measured
            print(f"LEFT OUT  {name}: {error!r}")
    return rows


def _forgets(contestant: Contestant[Any], measure: Measure) -> bool:
    return measure in PER_CALL and not contestant.stateful


def main() -> int:
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {'root' if os.geteuid() == 0 else 'a user'}")
    rows = [Row(Measure.CALL, "a byte there and back between two processes", round_trip(), JAIL)]
    rows += asyncio.run(figures(LOCAL))
    try:
        with engine():
            rows += asyncio.run(figures(ON_DOCKER))
    except Exception as error:
        print(f"LEFT OUT  everything on Docker: {error}")
    print(f"load {os.getloadavg()[0]:.1f}\n\n{table(rows)}\n")
    lines = verdicts(rows, BARS)
    print("\n".join(lines))
    return any(line.startswith("FAIL") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
