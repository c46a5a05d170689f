"""`agent-rl rollout` in a process of its own: what it stores while it runs, how it is stopped, how it continues."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from tree import ROOT

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.rollout import summarise
from agent_rl.runs.folder import file_of, read_config
from agent_rl.runs.rollout import RolloutSettings, start_rollout
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.view.progress import Progress
from tests.runs import SMALL

SLOW = """
import asyncio
from pathlib import Path
import agent_rl as ar

@ar.register("slow-v0", tasks=lambda split, index: {"n": index}, splits=("eval",))
class Slow(ar.Env):
    def reset(self, task, rng):
        self.n = task["n"]
        return str(self.n)

    async def step(self, action):
        Path(__file__).with_suffix(".stepping").touch()
        await asyncio.sleep(STEP)
        return ar.Step(terminated=True)

    async def close(self):
        Path(__file__).with_suffix(".closing").touch()
        await asyncio.sleep(HELD)

    @ar.reward
    def right(self, episode) -> bool:
        return episode.final_text == str(self.n)

    def oracle(self):
        yield str(self.n)
"""
N = 60


class Repeated(ar.ToolEnv):
    """Its oracle says one answer after the other, in all episodes together."""

    answers: ClassVar[Iterator[str]]

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        return "go"

    @ar.reward
    def right(self, episode: ar.Episode) -> bool:
        return episode.final_text == "a"

    def oracle(self) -> ar.Script:
        yield next(self.answers)


def start(folder: Path, step: float = 0.05, held: float = 0.0) -> subprocess.Popen[str]:
    (folder / "slow.py").write_text(SLOW.replace("STEP", str(step)).replace("HELD", str(held)))
    settings = [f"n={N}", "concurrency=2", f"out={folder}/kept.jsonl"]
    return agent_rl("rollout", "--import", f"{folder}/slow.py", "env=slow-v0", *settings)


def agent_rl(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agent_rl", *argv]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def stored(folder: Path) -> int:
    file = folder / "kept.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(condition: Callable[[], bool], missing: str) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, missing
        time.sleep(0.01)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.sandbox), signal.SIGTERM])
def test_rollout_stopped_by_a_signal_continues_with_the_printed_command(tmp_path: Path, number: int) -> None:
    process = start(tmp_path)
    wait_until(lambda: stored(tmp_path) >= 4, "no episode was stored")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    kept = stored(tmp_path)
    assert (process.returncode, err) == (130, "") and 4 <= kept < N
    assert f"Stopped; {kept} of {N} episodes in {tmp_path}/kept.jsonl" in " ".join(out.split("\n"))
    printed = re.search(r"continue with: agent-rl (.*)", out)
    assert printed is not None
    again = agent_rl(*shlex.split(printed[1]))
    out, err = again.communicate(timeout=60)
    assert (again.returncode, err) == (0, "") and f"100.0% [94.0%, 100.0%] of {N}" in out
    assert sorted(int(str(e.task["n"])) for e in read_episodes(tmp_path / "kept.jsonl")) == list(range(N))


def test_rollout_stopped_twice_does_not_wait_for_environments(tmp_path: Path) -> None:
    process = start(tmp_path, step=60.0, held=60.0)
    wait_until((tmp_path / "slow.stepping").exists, "no episode began")  # signals are handled by then
    process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "slow.closing").exists, "no episode was closed")  # what is under way is being closed
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 130 and "agent-rl rollout resume=" in out
    assert len(err.splitlines()) <= 3, err


def test_rollout_reports_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "n=3", f"out={tmp_path}/e.jsonl"]) == 0
    assert re.search(r"rollout 3/3  \S+ episodes/s, 0:00:00 left", capsys.readouterr().out)


def test_rollout_of_a_mixture_prints_intervals_over_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.jsonl"
    words = ["env=[guess-v0,calculator-v0]", "policy=demonstrator", "n=8", "samples=4", f"out={out}"]
    assert main(["rollout", *words]) == 0
    printed = capsys.readouterr().out
    for env, found in summarise(list(read_episodes(out))).of_env.items():
        low, high = found.success_interval
        assert f"{env}: success {found.success.value:6.1%} [{low:.1%}, {high:.1%}] of 16, reward" in printed


def test_rollout_names_a_file_that_has_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"out={tmp_path}/e.jsonl"
    assert main(["rollout", "n=3", out]) == 0
    before = (tmp_path / "e.jsonl").read_bytes()
    assert main(["rollout", "n=3", "seed=1", out]) == 1
    said = capsys.readouterr().err
    assert "has 3 episodes already" in said and f"agent-rl rollout resume={tmp_path}/e.jsonl" in said
    assert (tmp_path / "e.jsonl").read_bytes() == before
    (tmp_path / "f.yaml").write_text("name: a rubric")
    assert main(["rollout", "n=3", f"out={tmp_path}/f.jsonl"]) == 1 and "f.yaml would be" in capsys.readouterr().err
    assert (tmp_path / "f.yaml").read_text() == "name: a rubric" and not (tmp_path / "f.jsonl").exists()


def test_rollout_gives_each_of_equal_tasks_its_own_result(tmp_path: Path) -> None:
    ar.register("repeated-v0", tasks={"eval": [{"n": 0}] * 3})(Repeated)
    Repeated.answers = iter(["a", "a", "b"])
    own = {"env": "repeated-v0", "policy": {"name": "oracle"}, "floors": False, "out": str(tmp_path / "e.jsonl")}
    result = start_rollout(RolloutSettings.model_validate(own), Progress()).evaluation
    assert (result.success.successes, result.success.n, len(result.retried)) == (2, 3, 0)


@pytest.mark.parametrize("text", ["${HOME}", "${seed}", "${oc.env:NOWHERE}"])
def test_rollout_keeps_a_text_that_looks_like_a_reference(text: str, tmp_path: Path) -> None:
    own = {"env": "calculator-v0", "policy": {"name": "constant", "text": text}, "n": 1, "out": str(tmp_path)}
    start_rollout(RolloutSettings.model_validate(own), Progress())
    resumed = read_config(tmp_path, RolloutSettings, "episodes.yaml")
    assert resumed.policy.model_dump()["text"] == text  # type: ignore[union-attr]


def test_rollout_resumed_after_its_end_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "n=3", "samples=2", f"out={tmp_path}"]) == 0
    before = (tmp_path / "episodes.jsonl").read_bytes()
    assert main(["rollout", f"resume={tmp_path}"]) == 0
    assert "of 6" in capsys.readouterr().out and (tmp_path / "episodes.jsonl").read_bytes() == before


@pytest.mark.parametrize("setting", ["n=1000000000", "samples=1000000000", "retries.sandbox_lost=-1"])
def test_rollout_refuses_counts_that_are_slips(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", setting]) == 1
    assert f"{setting}: input should be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [(["resume=nowhere"], "nowhere/episodes.yaml"), (["resume=nowhere", "n=3"], "n can't change when a rollout is")],
)
def test_rollout_explains_what_cannot_be_resumed(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", *argv]) == 1
    assert hint in capsys.readouterr().err


def test_rollout_stores_groups_with_their_group_rewards(tmp_path: Path) -> None:
    ranks = "    @ar.group_reward\n    def first(self, group):\n"
    ranks += "        return [e is group.episodes[0] for e in group.episodes]\n"
    (tmp_path / "ranked.py").write_text(
        SLOW.replace("slow-v0", "ranked-v0").replace("HELD", "0").replace("STEP", "0.05") + ranks
    )
    settings = ["env=ranked-v0", "n=3", "samples=2", f"out={tmp_path}/e.jsonl"]
    assert main(["rollout", "--import", f"{tmp_path}/ranked.py", *settings]) == 0
    rewards = [[r.value for r in e.rewards if r.name == "first"] for e in read_episodes(tmp_path / "e.jsonl")]
    assert sorted(map(str, rewards)) == ["[0.0]"] * 3 + ["[1.0]"] * 3


def test_rollout_takes_a_budget(tmp_path: Path) -> None:
    assert main(["rollout", "n=2", "budget.turns=1", f"out={tmp_path}/e.jsonl"]) == 0
    assert [str(e.stop_reason) for e in read_episodes(tmp_path / "e.jsonl")] == ["turns", "turns"]


@pytest.mark.sandbox
def test_train_stopped_by_sigterm_says_how_to_continue(tmp_path: Path) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "steps": 500}
    process = agent_rl("train", *(f"{key}={json.dumps(value)}".replace('"', "") for key, value in settings.items()))
    until = time.monotonic() + 120
    while not any('"train"' in file.read_text() for file in tmp_path.glob("*/metrics.jsonl")):
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "continue with: agent-rl train resume=" in out and not err, err


def test_commands_of_one_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda how: "now")
    with file_of(None, "rollout") as first, file_of(None, "rollout") as second:
        assert [first, second] == [Path(f"runs/now-rollout{n}/episodes.jsonl") for n in ("", "-1")]
        second.touch()
    assert second.exists() and not first.parent.exists()


def test_refused_rollout_leaves_the_settings_of_a_live_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, settings = tmp_path / "episodes.jsonl", tmp_path / "episodes.yaml"
    settings.write_text("env: guess-v0\npolicy: {name: oracle}\nseed: 3\n")
    before = settings.read_bytes()
    with EpisodeWriter(file):
        assert main(["rollout", "env=calculator-v0", "policy=oracle", "n=2", f"out={file}"]) == 1
    assert "another writer" in capsys.readouterr().err and settings.read_bytes() == before
    assert main(["rollout", "env=calculator-v0", "policy=oracle", "n=2", "floors=false", f"out={file}"]) == 0
    assert len(list(read_episodes(file))) == 2 and settings.read_bytes() != before


def test_rollout_stores_all_where_nobody_reads_its_output(tmp_path: Path) -> None:
    shell = f"'{sys.executable}' -m agent_rl rollout env=guess-v0 n=3 out={tmp_path}/episodes.jsonl | :"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert "the work goes on without it" in done.stderr
    assert json.loads((tmp_path / "episodes.results.json").read_text())["episodes"] == 3
