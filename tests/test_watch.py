"""agent_rl.rollout.watch: the watchdog of rollouts, which names what hangs."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl import worker_threads
from agent_rl.backends.embedded.live_run import open_run
from agent_rl.cli import main
from agent_rl.cli.serve import run_server
from agent_rl.core.messages import ToolCall
from agent_rl.errors import StoreError
from agent_rl.rollout import Job, run_jobs
from agent_rl.rollout.episode import runs_under_way
from agent_rl.rollout.watch import activity_of, is_under_way, look, name_hung, read_status, watching
from agent_rl.runs.folder import status_of
from agent_rl.serving.host import ServerSettings
from agent_rl.view.progress import Progress
from tests.runs import config

NONE_UNDER_WAY = r"0 episodes under way, \d+ s ago"


class Stuck(ar.ToolEnv):
    """A tool that returns when the test says so."""

    entered = threading.Event()
    released = threading.Event()

    def reset(self, task, rng):
        return "Look."

    @ar.tool(timeout=None)
    def look(self) -> str:
        Stuck.entered.set()
        Stuck.released.wait(60)
        return "seen"

    @ar.reward
    def right(self, episode) -> bool:
        return True

    def oracle(self):
        yield ar.Message("assistant", tool_calls=(ToolCall("c", "look", {}),))
        yield "done"


ar.register("watch/stuck-v0")(Stuck)


def test_watchdog_names_the_episode_turn_and_call_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    status, named = tmp_path / "episodes.status.json", dict[int, float]()
    jobs = [Job(ar.spec("watch/stuck-v0"), {"n": n}, n, f"g{n}", id=f"e{n}") for n in range(2)]

    async def run() -> None:
        running = asyncio.create_task(run_jobs(jobs, ar.oracle()))
        async with asyncio.timeout(60):
            while len([r for r in runs_under_way() if r.clock.stage == "step"]) < 2:
                await asyncio.sleep(0.001)
        with caplog.at_level(logging.WARNING, "agent_rl"):
            look(status, 0.0, named)
            look(status, 0.0, named)
        assert {activity_of(r)["call"] for r in runs_under_way()} == {"look"}
        assert main(["rollout", "--status", str(tmp_path / "episodes.jsonl")]) == 0
        Stuck.released.set()
        await running

    asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    named_once = [rf"watch/stuck-v0, episode e{n}, turn 1: step \(look\) for \d+ s" for n in range(2)]
    assert len(said) == 2 and all(map(re.fullmatch, named_once, said)), "each call once"
    out = capsys.readouterr().out
    assert "2 episodes under way" in out and re.search(named_once[1], out)
    assert runs_under_way() == []


def test_episode_that_waits_for_its_caller_never_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = ar.as_trl("calculator-v0")()
    env.reset()
    with caplog.at_level(logging.WARNING, "agent_rl"):
        look(tmp_path / "status", 0.0, {})
    said = read_status(tmp_path / "status")
    assert not caplog.records
    assert len(said) == 2 and re.fullmatch(r"calculator-v0, group \S*, turn 1: caller for \d+ s", said[1])


def test_watchdog_writes_while_it_watches_and_cleans_up(tmp_path: Path) -> None:
    status = tmp_path / "e.status.json"
    with watching(status, interval=0.005):
        while not status.exists():
            threading.Event().wait(0.001)
        (line,) = read_status(status)
        assert re.fullmatch(NONE_UNDER_WAY, line)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="nothing is under way"):
        read_status(status)


def test_watchdog_outlives_a_status_that_cannot_be_written(tmp_path: Path) -> None:
    status, deadline = tmp_path / "gone" / "status.json", time.monotonic() + 30
    with watching(status, interval=0.005):
        time.sleep(0.05)
        status.parent.mkdir()
        while not status.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert status.exists()


def test_status_of_a_killed_process_is_not_under_way(tmp_path: Path) -> None:
    status = tmp_path / "e.status.json"
    look(status, 1.0, {})
    assert is_under_way(status) and not is_under_way(status, 0.0)
    with subprocess.Popen(["true"]) as gone:
        pass
    found = json.loads(status.read_text())
    status.write_text(json.dumps(found | {"pid": gone.pid}))
    assert not is_under_way(status)
    with pytest.raises(StoreError, match=f"nothing is under way: process {gone.pid}, which wrote .*, is gone"):
        read_status(status)
    status.write_text(json.dumps(found | {"pid": gone.pid, "of": "another machine"}))
    assert is_under_way(status) and read_status(status)
    status.write_bytes(b"\0\0")
    assert not is_under_way(status)
    with pytest.raises(StoreError, match=r"nothing is under way: .*e\.status\.json can't be read"):
        read_status(status)


def test_training_is_watched_until_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def watchdogs() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "agent_rl watchdog"]

    settings = config(tmp_path)
    with open_run(tmp_path, settings.load_env(), settings, Progress(), None):
        assert len(watchdogs()) == 1
        look(status_of(tmp_path), 1.0, {})
        assert main(["train", "--status", str(tmp_path)]) == 0
    assert not watchdogs() and re.fullmatch(NONE_UNDER_WAY, capsys.readouterr().out.strip())
    assert main(["train", "--status", str(tmp_path)]) == 1 and "nothing is under way" in capsys.readouterr().err


@pytest.mark.parametrize("blocking", [False, True])
def test_watchdog_says_how_a_sync_step_holds_up_no_others(blocking: bool, caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    class Sync(ar.Env):
        def reset(self, task, rng):
            return "go"

        def step(self, action):
            released.wait(60)
            return ar.Step(terminated=True)

        def oracle(self):
            yield "done"

    Sync.blocking = blocking
    ar.register(f"watch/sync-{blocking}-v0".lower())(Sync)
    job = Job(ar.spec(f"watch/sync-{blocking}-v0".lower()), {}, 0)
    playing = threading.Thread(target=lambda: asyncio.run(run_jobs([job], ar.oracle())))
    playing.start()
    while not any(run.clock.stage == "step" for run in runs_under_way()):
        threading.Event().wait(0.001)
    with caplog.at_level(logging.WARNING, "agent_rl"):
        name_hung(0.0, {})
    released.set()
    playing.join()
    assert "turn 1: step for 0 s" in caplog.text
    assert ("set blocking = True in Sync, or make it async" in caplog.text) is not blocking


def test_frozen_process_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_threads, "FROZEN", 0.5)
    with watching(tmp_path / "status.json", interval=0.1):
        time.sleep(1.0)  # which is no freeze
        assert "Timeout" not in capfd.readouterr().err
        sum(range(10**8))  # a call into C that keeps the interpreter's lock
    said = capfd.readouterr().err
    assert "Timeout" in said and re.search(r"test_watch\.py\", line \d+ in test_frozen_process_says_where", said)
    time.sleep(0.6)
    assert "Timeout" not in capfd.readouterr().err


def test_frozen_server_says_where(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        sum(range(10**8))
        os.kill(os.getpid(), signal.SIGTERM)
        yield "http://127.0.0.1:8000"

    monkeypatch.setattr(worker_threads, "FROZEN", 0.5)
    run_server(ServerSettings(), serving(), "episodes", lambda url: [url])
    said = capfd.readouterr().err
    assert "Timeout" in said and re.search(r"test_watch\.py\", line \d+ in serving", said)


def test_watched_process_says_where_it_froze_and_ends() -> None:
    code = "worker_threads.FROZEN = 0.5; watch_log(); watch_log(); sum(range(10**8))"
    imports = "from agent_rl import worker_threads; from agent_rl.rollout.watch import watch_log; "
    ran = subprocess.run([sys.executable, "-c", imports + code], capture_output=True, text=True, timeout=60, check=True)
    assert "Timeout" in ran.stderr and 'File "<string>", line 1 in <module>' in ran.stderr
