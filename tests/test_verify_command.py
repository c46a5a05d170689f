"""`agent-rl replay verify runs/latest`: what it says, its exit status, and its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.store.episodes import read_episodes
from tests.recorded import one, recorded, stored


def test_command_says_what_differs_and_exits_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "run", [*recorded("guess-v0", 4), *recorded("search-v0", 3)])
    assert main(["replay", "verify", str(folder), "--where", "env=guess-v0", "--limit", "3", "--workers", "1"]) == 0
    said = capsys.readouterr()
    assert "episodes, live: 3 same, 0 differ, 0 unverified" in said.out and "3/3" in said.err
    episode = next(e for e in read_episodes(folder) if e.env == "search-v0")
    opening = replace(episode.messages[0], content="???" + episode.messages[0].content)
    changed = replace(episode, id="\x1b[31mred", messages=(opening, *episode.messages[1:]))
    file = stored(tmp_path / "changed", [changed])
    assert main(["replay", "verify", str(file), "--workers", "1"]) == 1
    said = capsys.readouterr()
    assert "opening: opening[0].content differs at 0: recorded '???" in said.out and "\x1b" not in said.out
    assert main(["replay", "verify", str(file), "--json", "--mode", "cassette"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["found"]
    assert found["parts"]["opening"]["position"] == 0
    gone = stored(tmp_path / "gone", [replace(episode, env="gone-v0")])
    assert main(["replay", "verify", str(gone), "--workers", "1"]) == 2
    assert main(["replay", "verify", str(folder), "no-such-id"]) == 1
    with pytest.raises(ar.ConfigError, match="mode='dead'"):
        ar.verify(folder, mode="dead")  # type: ignore[arg-type]


SLOW = """
import asyncio, os, pathlib
import agent_rl as ar

@ar.register("slow-v0", tasks=[{"n": 1}])
class Slow(ar.Env):
    def reset(self, task, rng):
        return "hi"

    async def step(self, action):
        if "here" in os.environ:
            pathlib.Path(os.environ["here"], str(os.getpid())).touch()
            await asyncio.Event().wait()
        return ar.Step(terminated=True)

    def close(self):
        if "here" in os.environ:
            pathlib.Path(os.environ["here"], f"closed-{os.getpid()}").touch()
"""


@pytest.mark.sandbox
def test_processes_agree_and_end_at_once_when_interrupted(tmp_path: Path) -> None:
    name = f"slow-{tmp_path.name.rpartition('_')[2]}-v0"  # it may be run twice
    (tmp_path / "slow.py").write_text(SLOW.replace("slow-v0", name))
    ar.load_file(tmp_path / "slow.py")
    episode = one(ar.spec(name), "bye")
    file = stored(tmp_path / "run", (replace(episode, id=f"e{i:03d}") for i in range(40)))
    words = [sys.executable, "-m", "agent_rl", "replay", "verify", str(file), "--workers", "2"]
    words += ["--import", str(tmp_path / "slow.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "40 same" in done.stdout and done.returncode == 0, done.stderr
    (tmp_path / "here").mkdir()
    hung = subprocess.Popen(
        words, env={**os.environ, "here": str(tmp_path / "here")}, stderr=subprocess.PIPE, start_new_session=True
    )
    while len(list((tmp_path / "here").iterdir())) < 2:
        assert hung.poll() is None
        signal.sigtimedwait([], 0.05)
    os.killpg(hung.pid, signal.SIGINT)
    _, said = hung.communicate(timeout=60)
    pids = {path.name for path in (tmp_path / "here").iterdir() if not path.name.startswith("closed")}
    assert hung.returncode == 130 and b"Traceback" not in said, said
    assert {path.name for path in (tmp_path / "here").glob("closed-*")} == {f"closed-{pid}" for pid in pids}


def test_command_says_that_there_is_nothing_to_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "episodes.jsonl"
    file.touch()
    assert main(["replay", "verify", str(file)]) == 2
    assert "there is no episode to verify" in capsys.readouterr().out
