"""A watchdog for episodes under way: their turn and call, and for how long it has taken."""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

from agent_rl.core.display import plural
from agent_rl.errors import StoreError
from agent_rl.rollout.clock import CALLER
from agent_rl.rollout.episode import EpisodeRun, runs_under_way
from agent_rl.worker_threads import at_intervals

_log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two looks."""
HUNG = 300.0
"""Seconds in one call after which an episode is named in the log, once for each call."""
ON_LOOP = ("reset", "step", "restore", "snapshot", "state_hash")
"""The environment's methods that run on the event loop unless it is `blocking`."""
LISTED = 100
"""The episodes in the status file: those that have been in one call for longest."""


class Activity(TypedDict):
    """What an episode is doing."""

    id: str
    env: str
    group: str
    turn: int
    """Counted from 1; 0 before the policy's first."""
    stage: str
    """`reset`, `policy`, `step`, `score` or another method of the environment; `caller` while one is awaited."""
    call: str
    """The tools that a step calls."""
    in_call: float
    """Seconds in this call."""
    seconds: float
    """Since the episode began."""


@contextmanager
def watching(status: Path, interval: float = INTERVAL, hung: float = HUNG) -> Iterator[None]:
    """Write the episodes under way to a file at intervals, and warn of long calls, in a thread."""
    named = dict[int, float]()

    def watch() -> None:
        with suppress(OSError):  # a full disk, or a folder that is gone for a while: the next look may find room
            look(status, hung, named)

    try:
        with at_intervals(interval, watch, "agent_rl watchdog"):
            yield
    finally:
        status.unlink(missing_ok=True)


@functools.cache
def watch_log() -> None:
    """Name hung calls in the log until this process ends: for one that others ask for episodes."""
    watched = ExitStack()
    watched.enter_context(at_intervals(INTERVAL, functools.partial(name_hung, HUNG, {}), "agent_rl log watchdog"))
    atexit.register(watched.close)


def name_hung(hung: float, named: dict[int, float]) -> None:
    """Name hung calls in the log; `named` holds the beginnings of those named before. A caller may take its time."""
    for run in runs_under_way():
        is_long = run.clock.stage != CALLER and time.perf_counter() - run.clock.since >= hung
        if is_long and named.get(id(run)) != run.clock.since:
            named[id(run)] = run.clock.since
            _log.warning("%s%s", describe(activity_of(run)), _way_out(run))


def _way_out(run: EpisodeRun) -> str:
    """Return what helps where the call may hold up the event loop; an empty string elsewhere."""
    cls, stage = run.job.spec.cls, run.clock.stage
    if cls.blocking or stage not in ON_LOOP or inspect.iscoroutinefunction(getattr(cls, stage, None)):
        return ""
    return f"; it is sync and may hold up all other episodes: set blocking = True in {cls.__name__}, or make it async"


def look(status: Path, hung: float, named: dict[int, float]) -> None:
    """Write the status file, and name in the log what hangs."""
    name_hung(hung, named)
    runs = runs_under_way()
    busiest = sorted(map(activity_of, runs), key=lambda found: -found["in_call"])[:LISTED]
    writer = {"time": time.time(), "pid": os.getpid(), "of": _numbering()}
    text = json.dumps({**writer, "under_way": len(runs), "episodes": busiest})
    beside = status.with_name(f"{status.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(status)  # whole, for a reader at this moment


def activity_of(run: EpisodeRun) -> Activity:
    """Return what an episode is doing."""
    now, job = time.perf_counter(), run.job
    last = run.messages[-1] if run.messages else None
    calls = last.tool_calls if run.clock.stage == "step" and last is not None else ()
    return Activity(
        id=job.id or "",
        env=job.spec.id,
        group=job.group_id,
        turn=run.replies + (run.clock.stage in ("policy", CALLER)),
        stage=run.clock.stage,
        call=", ".join(call.name for call in calls),
        in_call=round(now - run.clock.since, 1),
        seconds=round(now - run.clock.started, 1),
    )


def describe(found: Activity) -> str:
    """Return an episode's activity as a line."""
    name = f"episode {found['id']}" if found["id"] else f"group {found['group']}"
    stage = f"{found['stage']} ({found['call']})" if found["call"] else found["stage"]
    return f"{found['env']}, {name}, turn {found['turn']}: {stage} for {found['in_call']:.0f} s"


def read_status(status: Path) -> list[str]:
    """Return a line for each episode under way, the longest call first.

    Raises:
        StoreError: if there is none, or its process was killed.
    """
    try:
        found = json.loads(status.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a machine's failure may leave an empty one
        why = f"there is no {status}" if isinstance(error, FileNotFoundError) else f"{status} can't be read"
        raise StoreError(f"nothing is under way: {why}, which a rollout or a run writes beside its episodes") from None
    age = max(0.0, time.time() - found["time"])
    if _was_killed(found):
        raise StoreError(f"nothing is under way: process {found['pid']}, which wrote {status} {age:.0f} s ago, is gone")
    stale = ": the process may be gone" if age > 10 * INTERVAL else ""
    head = f"{plural(found['under_way'], 'episode')} under way, {age:.0f} s ago{stale}"
    return [head, *map(describe, found["episodes"])]


def is_under_way(status: Path, patience: float = 10 * INTERVAL) -> bool:
    """Return whether a process wrote a status in the last `patience` seconds, and is not known to be gone."""
    try:
        found = json.loads(status.read_text(encoding="utf-8"))
        return time.time() - found["time"] < patience and not _was_killed(found)
    except (OSError, ValueError, KeyError):
        return False


def _was_killed(found: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a status is gone, as far as this one can tell."""
    if found.get("of") != _numbering():  # another machine's or container's, or an older version's
        return False
    return is_gone(found["pid"])


def is_gone(pid: int) -> bool:
    """Return whether this machine, or container, has no process of a number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False


def _numbering() -> str:
    """Return where a number means one process: a machine, and a container, which may have its machine's name."""
    namespace = Path("/proc/self/ns/pid")
    return f"{sys.platform} {socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"
