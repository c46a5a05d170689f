"""The cost of our sandboxes beside their alternatives: `python benchmarks/sandbox.py`, or with names, of some (`jail`).

Every contestant does the same, for a second each (five times at least): it evaluates `6 * 7` in Python, and the answer
is checked; it runs `true`. Peers that keep no state start a Python for each call, as bare as ours (`-I -S`).

Times are medians of wall-clock time, of three rounds the best one, and the rounds take turns: they still want a quiet
machine, and the load is printed. A call needs two wake-ups of another process, so the table also has the time of one
byte there and back. Memory is the middle one of the rounds; each page is shared out among the processes that have it.

What is not installed is left out, and said so. The containers' engine is that of $DOCKER_HOST, or of Docker's own
socket; as root, with dockerd and neither of them, one is started for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from sandbox_measures import METERS, Contestant, NotHereError, round_trip
from sandbox_ours import docker, docker_warm, engine, local
from sandbox_peers import bubblewrap, docker_exec, inspect_docker, inspect_local, processes, worker
from sandbox_table import Bar, Measure, Row, merged, table, verdicts

from agent_rl.errors import AgentRLError

ROUNDS = 3
JAIL, DOCKER, DOCKER_RUN = "agent_rl jail", "agent_rl docker", "docker run, docker exec"
FLOOR = "the floor: a byte there and back between two processes"
Contestants = Mapping[str, Callable[[], AbstractAsyncContextManager[Contestant[Any]]]]
LOCAL: Contestants = {
    JAIL: functools.partial(local, "jail"),
    "agent_rl landlock": functools.partial(local, "landlock"),
    "Python worker on pipes, no isolation": functools.partial(worker, JAIL),
    "bare subprocess, no isolation": functools.partial(processes, JAIL),
    "bubblewrap": functools.partial(bubblewrap, JAIL),
    "inspect_ai local, no isolation": functools.partial(inspect_local, JAIL),
}
ON_DOCKER: Contestants = {
    DOCKER: docker,
    "agent_rl docker, from a WarmPool": docker_warm,
    DOCKER_RUN: functools.partial(docker_exec, DOCKER),
    "inspect_ai docker": functools.partial(inspect_docker, DOCKER),
}
BARS = (
    Bar(Measure.CALL, JAIL, 0.10),
    Bar(Measure.OPEN, JAIL, 10.0),
    Bar(Measure.IDLE, JAIL, 3.5),
    Bar(Measure.RATE, JAIL, 20000.0),
    Bar(Measure.CALL, DOCKER, 1.0),
    Bar(Measure.OPEN, DOCKER, 1.2, DOCKER_RUN),
)
PER_CALL = frozenset({Measure.CALL, Measure.RATE})


async def figures(contestants: Contestants) -> list[Row]:
    """Measure the available contestants, one after another; report the others with the reason."""
    rows: list[Row] = []
    for name, make in contestants.items():
        try:
            async with make() as contestant:
                _say(f"measuring {name}{contestant.version and f' ({contestant.version})'}")
                for measure in filter(contestant.measures.__contains__, METERS):
                    rows += await _row(name, contestant, measure)
        except Exception as error:  # an error of a contestant must not end the others
            _say(f"LEFT OUT  {name}: {_reason(error)}")
    return rows


async def _row(name: str, contestant: Contestant[Any], measure: Measure) -> list[Row]:
    try:
        value = await METERS[measure](contestant)
    except NotHereError as reason:
        _say(f"LEFT OUT  {name}, {measure}: {reason}")
        return []
    forgets = measure in PER_CALL and not contestant.stateful
    return [Row(measure, f"{name}: python -c, keeps no state" if forgets else name, value, contestant.beside)]


@functools.cache
def _say(line: str) -> None:
    """Print a line once, not in every round."""
    print(line, flush=True)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (NotHereError, AgentRLError)) else f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of contestants' names; without, all of them")
    names = parser.parse_args().names
    here, on_docker = (
        {name: every[name] for name in every if not names or any(part in name for part in names)}
        for every in (LOCAL, ON_DOCKER)
    )
    who = "root" if os.geteuid() == 0 else "a user"
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {who}; {platform.platform()}")
    rows = []
    for _ in range(ROUNDS):
        rows.append(Row(Measure.CALL, FLOOR, round_trip(), JAIL))
        rows += asyncio.run(figures(here))
    try:
        with engine() if on_docker else contextlib.nullcontext():
            for _ in range(ROUNDS):
                rows += asyncio.run(figures(on_docker))
    except Exception as error:
        _say(f"LEFT OUT  everything on Docker: {_reason(error)}")
    rows = merged(rows)
    print(f"load {os.getloadavg()[0]:.1f}\n\n{table(rows)}\n")
    lines = verdicts(rows, BARS)
    print("\n".join(lines))
    return any(line.startswith("FAIL") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
