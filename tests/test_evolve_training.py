"""Training with `judge.evolve=true`: criteria are proposed, judged from the next visit, saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.backends.embedded.run import resume_run
from agent_rl.errors import ConfigError
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.run import run_judge
from agent_rl.runs.config import RunConfig
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.fake_judge import FakeJudge
from tests.fake_openai import Answer, FakeOpenAI, said
from tests.runs import SMALL, config, metrics_of, weights, whole_and_killed

ENV = "evolve-test-v0"
MEASURED = ("judge/seconds", "judge/calls", "judge/input_tokens", "judge/cached_tokens", "judge/output_tokens")
"""Of calls that are made: what the log has is not."""


@ar.register(ENV, tasks={"train": [{"n": 1}, {"n": 2}], "eval": [{"n": 3}]}, budget=ar.Budget(turns=1))
class Letters(ar.Env):
    """Say something."""

    said = ar.judge(rubric={"criteria": [{"id": "says", "text": "It says anything.", "rule": {"regex": "."}}]})

    def reset(self, task: ar.Task, rng: object) -> str:
        return f"letters {task['n']}"

    def step(self, action: ar.Message) -> ar.Step:
        return ar.Step(terminated=True)

    def oracle(self) -> ar.Script:
        yield "a b c"


def answer(body: dict[str, object]) -> Answer:
    """Judge by words; propose a word for each step, and fail for one task."""
    messages = body["messages"]
    assert isinstance(messages, list)
    if not messages[0]["content"].startswith("You improve"):
        return FakeJudge()(body)
    shown = messages[1]["content"]
    if "letters 2" in shown:
        return said("I would rather not.")
    known = shown.rpartition("Criteria in use:\n")[2].count("\n")
    return said(json.dumps({"positive": [f'It contains the word "{"abcdefgh"[known]}".'], "negative": []}))


@pytest.mark.sandbox
def test_killed_run_resumes_its_criteria(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeOpenAI(answer) as server:
        judge = {"model": "m", "base_url": server.url, "evolve": True, "retries": 0}
        small = {"rollout": SMALL["rollout"] | {"groups": 2, "max_tokens": 12}, "budget": {"tokens": 96}}  # type: ignore[operator]
        small |= {"warm_start": {"demonstrations": 8, "copy_steps": 1, "clone_steps": 2, "batch": 8}}
        settings = config(tmp_path, env=ENV, judge=judge, **small)
        whole, killed = whole_and_killed(settings, monkeypatch)
        before = len(server.asked)
        resume_run(killed, Progress())
    assert len(server.asked) - before < before / 2  # the log has what was asked before the kill

    first, second = weights(whole), weights(killed)
    assert all(bool((first[name] == second[name]).all()) for name in first)
    states = [json.loads((folder / "checkpoint" / "criteria.json").read_text()) for folder in (whole, killed)]
    assert states[0] == states[1] and len(states[0]) == 2
    first_rows, second_rows = (
        [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in metrics_of(folder)]
        for folder in (whole, killed)
    )
    assert first_rows == second_rows

    buffers = sorted(states[0].values(), key=lambda buffer: len(buffer["active"]) + len(buffer["retired"]))
    assert buffers[0]["active"] == [] and buffers[1]["active"] + buffers[1]["retired"] and buffers[0]["visits"] > 1
    episodes = [e for e in read_episodes(whole) if e.origin.purpose == "train"]
    asked = {(e.task["n"], e.origin.step): [v.criterion for v in e.judgements[0].verdicts] for e in episodes}
    firsts = {n: min(step for m, step in asked if m == n) for n in (1, 2)}  # type: ignore[type-var]
    assert all(asked[n, step] == ["says"] for n, step in firsts.items())
    assert max(len(criteria) for (n, _), criteria in asked.items() if n == 1) > 1
    assert all(len(e.judgements[0].verdicts) == 1 for e in read_episodes(whole) if e.origin.purpose == "eval")


def test_evolve_needs_a_model_a_judge_and_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evolve needs a model"):
        JudgeConfig(evolve=True)
    settings = JudgeConfig(model="m", base_url="http://127.0.0.1:9/v1", evolve=True)
    with pytest.raises(ConfigError, match="criteria evolve in training"), run_judge(settings, ar.spec(ENV), tmp_path):
        pass
    with (
        pytest.raises(ConfigError, match=r"in an environment with @ar\.judge"),
        run_judge(settings, ar.spec("search-v0"), tmp_path, evolves=True),
    ):
        pass
    assert RunConfig.model_validate({"env": ENV}).judge.evolve is False
