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
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from sandbox_measures import METERS, Contestant, NotHereError, round_trip
from sandbox_ours import docker, docker_warm, engine, local
from sandbox_peers import bubblewrap, docker_exec, inspect_docker, inspect_local, processes, worker
from sandbox_table import Bar, Measure, Row, table, verdicts

from agent_rl.errors import AgentRLError

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
    rows: list[Row] = []
    for name, make in contestants.items():
        try:
            async with make() as contestant:
                print(f"measuring {name}{contestant.version and f' ({contestant.version})'}", flush=True)
                for measure in filter(contestant.measures.__contains__, METERS):
                    rows += await _row(name, contestant, measure)
        except Exception as error:  # whatever other people's code raises, the rest is measured
            print(f"LEFT OUT  {name}: {_reason(error)}")
    return rows


async def _row(name: str, contestant: Contestant[Any], measure: Measure) -> list[Row]:
    try:
        value = await METERS[measure](contestant)
    except NotHereError as reason:
        print(f"LEFT OUT  {name}, {measure}: {reason}")
        return []
    forgets = measure in PER_CALL and not contestant.stateful
    return [Row(measure, f"{name}: python -c, keeps no state" if forgets else name, value, contestant.beside)]


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (NotHereError, AgentRLError)) else f"{type(error).__name__}: {error}"


def main() -> int:
    who = "root" if os.geteuid() == 0 else "a user"
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {who}; {platform.platform()}")
    rows = [Row(Measure.CALL, "the floor: a byte there and back between two processes", round_trip(), JAIL)]
    rows += asyncio.run(figures(LOCAL))
    try:
        with engine():
            rows += asyncio.run(figures(ON_DOCKER))
    except Exception as error:
        print(f"LEFT OUT  everything on Docker: {_reason(error)}")
    print(f"load {os.getloadavg()[0]:.1f}\n\n{table(rows)}\n")
    lines = verdicts(rows, BARS)
    print("\n".join(lines))
    return any(line.startswith("FAIL") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
