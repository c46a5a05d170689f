"""What an episode leaves behind after `close`: files, processes, threads, tasks, temporary files."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from agent_rl.checks.bench import Bench
from agent_rl.checks.report import place
from agent_rl.worker_threads import idle_threads

EPISODES = 4
"""Whatever grows by one in each of so many episodes is left behind by them."""
_REMEDIES = {
    "open file": "close it in close(), or open it in a `with` block",
    "process": "end it and wait for it in close()",
    "thread": "end it and join it in close()",
    "task": "cancel it in close(), and await it",
    "temporary file": "remove it in close(), or write into a tempfile.TemporaryDirectory() that close() cleans up",
}


async def check_leaks(bench: Bench) -> None:
    """Find what stays after `close`."""
    folder = Path(tempfile.mkdtemp(prefix="agent-rl-check-"))
    # not sooner: a sandbox that waits for the next episode may keep its own there
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for example in bench.examples()[:1] + bench.examples()[-1:]:
        keeping, kept = bench.keeping()
        before, old = _held(folder), tempfile.tempdir
        for _ in range(EPISODES):
            tempfile.tempdir = str(folder)
            try:
                await keeping.play_again(example)
            finally:
                tempfile.tempdir = old
        for _ in range(3):  # a task that was cancelled ends in the next round of the event loop
            await asyncio.sleep(0)
        after = _held(folder)
        kept.clear()
        for kind, held in after.items():
            left = sorted(held.keys() - before[kind].keys())
            if len(left) >= EPISODES:
                names = ", ".join(held[key] for key in left[:3])
                problem = f"each episode leaves a {kind} after close(): {names}"
                bench.find("leak", problem, place(bench.cls, "close"), _REMEDIES[kind])


def _held(folder: Path) -> dict[str, dict[int | str, str]]:
    """Return what this process holds, by kind and id, with names."""
    idle = idle_threads()
    return {
        "open file": dict(_files()),
        "process": dict(_children()),
        "thread": {id(t): t.name for t in threading.enumerate() if t not in idle},
        "task": {id(t): repr(t.get_coro()) for t in asyncio.all_tasks()},
        "temporary file": {path.name: str(path) for path in folder.iterdir()},
    }


def _files() -> Iterator[tuple[int | str, str]]:
    """Yield the open descriptors; none where the system does not list them."""
    listing = Path("/dev/fd")
    for name in os.listdir(listing) if listing.is_dir() else ():  # noqa: PTH208  # an entry may be gone by now
        with contextlib.suppress(OSError):
            target = os.readlink(listing / name)  # noqa: PTH115
            yield f"{name} {target}", target


def _children() -> Iterator[tuple[int | str, str]]:
    """Yield the child processes; none where there is no /proc."""
    own = str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            name, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
            if rest.split()[1] == own:
                yield int(stat.parent.name), f"{name} ({stat.parent.name})"
