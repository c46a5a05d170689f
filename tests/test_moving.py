"""An environment that changes the working directory: what a run writes stays in one place."""

import json
import os
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.cli import main
from tests.runs import SMALL

ELSEWHERE = Path(__file__).parent / "data"


@ar.register("moving-v0", tasks=[{"n": n} for n in range(40)])
class Moving(ar.ToolEnv):
    """Asks for a number, from another directory."""

    def reset(self, task: ar.Task, rng: object) -> str:
        self.n = task["n"]
        os.chdir(ELSEWHERE)
        return f"say {self.n}"

    @ar.reward
    def correct(self, episode: ar.Episode) -> bool:
        return episode.final_text == str(self.n)

    def oracle(self) -> ar.Script:
        yield str(self.n)


def test_rollout_stays_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", "env=moving-v0", "n=2", "out=of/episodes.jsonl"]) == 0
    assert json.loads(Path(tmp_path, "of", "episodes.results.json").read_text())["success"] == 1.0
    assert f"read one: agent-rl view {tmp_path}/of/episodes.jsonl" in capsys.readouterr().out


def test_training_stays_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = SMALL | {"env": "moving-v0", "steps": 1, "eval": {"n": 2, "every": 0}, "checkpoint_every": 1}
    settings |= {"warm_start": {"demonstrations": 8, "copy_steps": 1, "clone_steps": 1, "batch": 4}}
    run = ar.train(**settings, progress=False)  # type: ignore[arg-type]
    assert run.folder == (tmp_path / "runs" / "latest").resolve()
    assert (run.folder / "summary.json").exists() and run.policy()
