"""The zygote and its backend where the host runs short, loops change, and calls are cancelled at bad moments."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from agent_rl.concurrency import LoopThread
from agent_rl.sandboxes.local import homes
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.local.zygote import USERS, SandboxProcess, Zygote
from agent_rl.sandboxes.pool import WarmPool
from tests.sandbox.backends import LIMITS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="local sandboxes need Linux")


def ended(home: Path | None = None, number: int = 0) -> SandboxProcess:
    control, lease = socket.socketpair()
    return SandboxProcess(0, number, control, lease, time.monotonic() + 60, [], home, ending=True, status=0)


def test_zygote_outlives_a_host_without_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that has all processes of its user must not end the zygote by the closing of another sandbox."""
    zygote, ward = object.__new__(Zygote), ended(tmp_path / "home")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_spawnp", lambda *_, **__: (_ for _ in ()).throw(BlockingIOError(11, "none left")))
        assert not zygote._forget(ward), "it is tried again"
        ward.expires = 0.0
        assert zygote._forget(ward), "but not for ever"
    (tmp_path / "home").mkdir()
    assert zygote._forget(ended(tmp_path / "home"))
    until = time.monotonic() + 30
    while (tmp_path / "home").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not (tmp_path / "home").exists()


def test_zygote_gives_no_two_sandboxes_one_user() -> None:
    def given(taken: Iterable[int], slot: int) -> int:
        zygote = object.__new__(Zygote)
        zygote.wards = {n: SandboxProcess(0, n, None, None, 0.0, [], None) for n in taken}  # type: ignore[arg-type]
        return zygote._free_number(slot)

    assert [given((0, 1, 3), slot) for slot in (0, USERS, 2, 3, 7)] == [2, 2, 2, 4, 7]
    assert given(range(USERS), USERS + 5) == 5


def test_collect_bears_folders_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_parent", lambda: tmp_path)
    (tmp_path / f"{homes.PREFIX}1-1").symlink_to("nowhere")
    homes.collect()


def test_cancelled_open_leaves_no_zygote(jails: LocalSandboxes) -> None:
    async def main() -> None:
        backend = LocalSandboxes(LIMITS, require=())
        opening = asyncio.create_task(backend.open(lifetime=60))
        await asyncio.sleep(0.05)  # while a thread starts the zygote
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await backend.close()
        await asyncio.sleep(1)
        assert backend._zygote is None

    asyncio.run(main())


def test_sandbox_changes_its_event_loop_while_the_first_runs(jails: LocalSandboxes) -> None:
    first, pool = LoopThread("first"), WarmPool(jails, warm=2, most=8)

    async def work() -> list[float]:
        boxes = [await pool.open(lifetime=60) for _ in range(2)]
        seconds = []
        for box in boxes * 5:
            started = time.monotonic()
            assert (await box.exec(["true"], timeout=5)).returncode == 0
            seconds.append(time.monotonic() - started)
        await asyncio.gather(*(box.close() for box in boxes))
        return seconds

    first.wait(pool.fill())
    for _ in range(3):
        assert max(asyncio.run(work())) < 5, "an answer went to the loop of before"
    first.close()


def test_sandbox_takes_turns_in_every_event_loop(jails: LocalSandboxes) -> None:
    with asyncio.Runner() as first:
        box = first.run(jails.open(lifetime=60))

    async def together() -> None:
        for result in await asyncio.gather(*(box.exec(["true"]) for _ in range(3))):
            assert result.returncode == 0

    for _ in range(2):
        asyncio.run(together())
    asyncio.run(box.close())
