"""`agent-rl rollout policy=openai`: results, keys, failures run again, continued rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.store.episodes import read_episodes
from tests.fake_openai import Answer, FakeOpenAI, failed, said

OF_THE_README = "agent-rl rollout policy=openai policy.model=MODEL env=search-v0 n=100 samples=4 by=relation"


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, no_pause: None) -> str:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    return "sk-secret"


def rollout(*words: str) -> int:
    return main(["rollout", *words])


def test_rollout_of_a_served_model_stores_results_and_no_key(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prices.yaml").write_text("m: {input: 1000, output: 10000}\n")
    prices, out = f"prices={tmp_path}/prices.yaml", f"out={tmp_path}/out"
    with FakeOpenAI(lambda body: said("nothing", "length"), key=key) as server:
        played = [*OF_THE_README.replace("MODEL", "m").split()[2:], f"policy.base_url={server.url}", out]
        assert rollout(*played, "by=relatio") == 1 and rollout(*played, "prices=none.yaml") == 1
        assert not server.asked and not (tmp_path / "out").exists(), "refused before the first episode"
        assert rollout(*played, "n=3", "samples=2", prices, "floors=true") == 0
    shown = capsys.readouterr().out
    assert "tokens: 600 in, 60 out, cost 1.2" in shown and "oracle 100.0%" in shown and "relation  tasks" in shown
    results = json.loads((tmp_path / "out/episodes.results.json").read_text())
    assert results["usage"]["replies"] == 6 and results["stops"] == {"length": 6} and results["pass_at"]["2"] == 0
    assert results["floors"]["oracle"]["success"] == 1 and set(results["tags"]) == {"born", "lives"}
    assert not [file for file in (tmp_path / "out").iterdir() if key in file.read_text()]
    assert [len(e.usage) for e in read_episodes(tmp_path / "out")] == [1] * 6


def test_rollout_runs_failures_again_on_request(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.jsonl"

    def moody(body: dict[str, Any]) -> Answer:
        return failed(400, "not today") if len(server.asked) % 2 else said("x")

    with FakeOpenAI(moody) as server:
        played = ["env=search-v0", "policy=openai", "policy.model=m", f"policy.base_url={server.url}", "concurrency=1"]
        assert rollout(*played, "n=4", f"out={file}") == 0
        assert f"Run them again: agent-rl rollout resume={file} retry_failed=true" in capsys.readouterr().out
        assert [e.outcome == "failed" for e in read_episodes(file)] == [True, False, True, False]
        assert rollout(f"resume={file}") == 0 and len(server.asked) == 4, "a failure is an end"
        server._answer = lambda body: said("y")
        capsys.readouterr()
        assert rollout(f"resume={file}", "retry_failed=true", "by=relation") == 0
    assert len(server.asked) == 6, "only failures are run again"
    shown = capsys.readouterr().out
    assert "of 4, reward" in shown and "0 failed" in shown and "replies: 6 (2 of unknown tokens)" in shown
    stored = list(read_episodes(file))
    assert len(stored) == 6 and [e.final_text for e in stored[4:]] == ["y", "y"]
    assert {(e.group_id, e.seed) for e in stored[4:]} == {(e.group_id, e.seed) for e in stored if e.error}


def test_rollout_of_a_served_model_continues_by_task(tmp_path: Path, key: str) -> None:
    file = tmp_path / "e.jsonl"
    with FakeOpenAI(lambda body: said("x")) as server:
        played = ["env=search-v0", "policy=openai", "policy.model=m", f"policy.base_url={server.url}"]
        assert rollout(*played, "n=4", f"out={file}") == 0
        whole = {e.group_id for e in read_episodes(file)}
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(lines[2] + lines[0] + lines[1][:100])  # killed in the middle of a line
        with pytest.warns(UserWarning, match="torn line"):
            assert rollout(f"resume={file}") == 0
        assert len(server.asked) == 6 and {e.group_id for e in read_episodes(file)} == whole


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["retry_failed=true"], "retry_failed=true belongs to resume=FILE"),
        (["resume=nowhere", "policy=oracle"], "concurrency, judge.max_cost, judge.prices; retry_failed=true"),
        (["policy=openai"], "policy.model: field required"),
        (["policy=openai", "policy.model=m", "policy.base_url=http://127.0.0.1:9/v1"], "can't be reached"),
    ],
)
def test_rollout_explains_mistakes_shortly(
    words: list[str], hint: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(*words, *([] if "resume=nowhere" in words else [f"out={tmp_path}/e.jsonl"])) == 1
    said = capsys.readouterr().err
    assert hint in said and len(said.splitlines()) <= 3


def test_evaluate_takes_samples_of_a_served_model(key: str) -> None:
    with FakeOpenAI(lambda body: said(f"{len(server.asked) % 2}")) as server:
        policy = {"name": "openai", "model": "m", "base_url": server.url}
        result = ar.evaluate("search-v0", policy, n=2, samples=3, concurrency=2)
    assert len(server.asked) == 6 and result.usage.replies == 6 and result.pass_at(3) == 0.0
