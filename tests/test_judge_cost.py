"""`agent-rl judge` with a served model: no call twice, stopped and continued, its cost told before and bounded."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import openai
import pytest

from agent_rl.cli import main
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError
from agent_rl.judge import estimate
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.judged import load_judged
from agent_rl.judge.model import ModelJudge
from agent_rl.judge.offline import judge_episodes
from agent_rl.judge.panel import Panel
from agent_rl.store.episodes import EpisodeWriter
from tests.fake_judge import Asked, FakeJudge, answered
from tests.fake_openai import HANG, Answer, Body, FakeOpenAI, failed

RUBRIC = """
name: words
criteria:
  - {id: a, text: 'The response contains the word "alpha".'}
  - {id: b, text: 'The response contains the word "beta".', weight: 2}
  - {id: c, text: Short., rule: {regex: '^.{1,40}$'}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pause: None) -> Path:
    """Six episodes, a rubric and prices."""
    with EpisodeWriter(tmp_path / "run") as writer:
        for number in range(6):
            writer.write(answered(f"alpha {'beta' if number % 2 else ''} {number}", f"Which {number}?", f"e{number}"))
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    (tmp_path / "prices.yaml").write_text("m: {input: 1000, output: 1000}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], server: FakeOpenAI, action: str, *words: str) -> tuple[int, str]:
    status = main(["judge", action, "run", "rubric.yaml", "judge.model=m", f"judge.base_url={server.url}", *words])
    out, err = capsys.readouterr()
    assert len(err.splitlines()) <= 3 and "Traceback" not in err
    return status, out + err


def test_estimate_says_what_run_then_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(FakeJudge()) as server:
        words = ("judge.per_call=1", "judge.prices=prices.yaml", "-o", "a/b.jsonl")
        status, said = call(capsys, server, "estimate", *words)
        assert status == 0 and "calls: 12 for 6 episodes; 0 are in a/calls.jsonl" in said and "cost: ~" in said
        assert server.asked == [] and not Path("a").exists()
        status, said = call(capsys, server, "run", *words, "--limit", "5")
        assert status == 0 and "calls: 10, attempts: 10" in said and "cost 1.1" in said
        assert {j.score for j in load_judged("a/b.jsonl").judgements} == {0.5, 1.0}
        status, said = call(capsys, server, "estimate", *words)
        assert "calls: 2 for 6 episodes; 10 are in" in said and "10 logged calls took" in said
        tokens = re.search(r"tokens: ~(\d+)(?: to (\d+))? in, ~20 out", said)
        assert tokens is not None and 190 <= int(tokens[1]) <= int(tokens[2] or tokens[1]) <= 210  # 100 a call
        assert len(server.asked) == 10


def test_estimate_needs_no_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    words = ["run", "rubric.yaml", "judge.model=m"]
    assert main(["judge", "estimate", *words]) == 0 and "calls: 6 for 6 episodes" in capsys.readouterr().out
    assert main(["judge", "run", *words]) == 1 and "needs a key: set OPENAI_API_KEY" in capsys.readouterr().err


def test_estimate_passes_over_logged_comparisons_and_damage(capsys: pytest.CaptureFixture[str]) -> None:
    task = {"role": "user", "content": "Task:\n\nCriteria:\n- Good."}
    body = {"model": "m", "messages": [{"role": "system", "content": "Compare."}, task]}
    with FakeOpenAI(FakeJudge()) as server:
        call(capsys, server, "run", "-o", "a.jsonl")
        with Path("calls.jsonl").open("a") as log:
            log.write(
                json.dumps(
                    {"key": "0" * 64, "request": body, "answer": {"content": ""}, "usage": asdict(Usage("m", 9, 9))},
                    separators=(",", ":"),
                )
                + '\n{"key":"damaged\n'
            )
        status, said = call(capsys, server, "estimate", "judge.samples=2", "judge.permute=false", "-o", "b.jsonl")
    assert status == 0 and "calls: 6 for 6 episodes; 6 are in" in said and "6 logged calls took" in said


def test_run_with_other_weights_makes_no_call(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(FakeJudge()) as server:
        call(capsys, server, "run", "-o", "a.jsonl")
        asked = len(server.asked)
        Path("rubric.yaml").write_text(RUBRIC.replace("weight: 2", "weight: 7"))
        status, said = call(capsys, server, "run", "-o", "b.jsonl")
        assert (status, asked, len(server.asked)) == (0, 6, 6) and "6 calls were in calls.jsonl" in said
        assert load_judged("b.jsonl").judgements[0].score == pytest.approx(2 / 9)
        Path("b.jsonl").unlink()  # lost; the log is the cache
        call(capsys, server, "run", "-o", "b.jsonl")
        assert len(server.asked) == 6


def test_run_stops_at_its_cost_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(FakeJudge()) as server:  # 0.11 a call
        words = ("judge.prices=prices.yaml", "judge.concurrency=1", "-o", "a.jsonl")
        status, said = call(capsys, server, "run", "--max-cost", "0.3", *words)
        assert status == 1 and "the calls have cost 0.33 (judge.max_cost=0.3); 3 episodes are judged in a.jsonl" in said
        assert "--max-cost 0.3" in said and len(server.asked) == 3
        assert not any(j.faults for j in load_judged("a.jsonl").judgements)
        assert call(capsys, server, "run", *words)[0] == 0 and len(server.asked) == 6


def test_run_counts_calls_that_take_too_long_in_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("judge.prices=prices.yaml", "judge.concurrency=1", "judge.timeout=0.3", "-o", "a.jsonl")
    with FakeOpenAI(lambda _: HANG) as server:
        status, said = call(capsys, server, "run", "--max-cost", "1", *words)
    sizes = (sum(len(message["content"]) for message in body["messages"]) for body in server.asked)
    cost = sum(size // 4 / 1000 + 0.256 for size in sizes)  # a usual reply's tokens
    assert status == 1 and len(server.asked) == 2
    assert f"the calls have cost {cost:.4g} (judge.max_cost=1)" in said


def test_run_counts_no_call_that_reached_no_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(self: object, **body: object) -> None:
        raise openai.APITimeoutError(httpx.Request("POST", "http://x")) from httpx.ConnectTimeout("")

    words = ("judge.prices=prices.yaml", "--max-cost", "0.01", "-o", "a.jsonl")
    monkeypatch.setattr("openai.resources.chat.completions.AsyncCompletions.create", create)
    with FakeOpenAI() as server:
        assert call(capsys, server, "run", *words)[0] == 0
    assert {j.verdicts[0].error for j in load_judged("a.jsonl").judgements} == {"timeout"}


def test_run_counts_the_calls_of_judgements_that_its_cost_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("judge.prices=prices.yaml", "judge.per_call=1", "judge.concurrency=4", "-o", "a.jsonl")
    with FakeOpenAI(FakeJudge()) as server:  # two calls an episode
        said = call(capsys, server, "run", "--max-cost", "0.1", *words)[1]
        paid = len(server.asked)
        assert load_judged("a.jsonl").judgements == () and f"cost {paid * 0.11:.4g} (judge.max_cost=0.1); 0 epi" in said
        assert f"calls: {paid}, attempts: {paid}" in said and f"cost {paid * 0.11:.4g}\n" in said
        said = call(capsys, server, "run", *words)[1]
        assert len(server.asked) == 12 and "calls: 12, attempts: 12" in said and "of 6 episodes, 0 unscored" in said


@pytest.mark.parametrize("cut", [("--max-cost", "0.05"), ("judge.retries=0",)])
def test_run_judges_what_could_not_be_asked_again(cut: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("judge.prices=prices.yaml", "judge.concurrency=1", "-o", "a.jsonl")
    broken = FakeJudge(["broken"])  # which a second question would mend
    with FakeOpenAI(lambda body: failed(500) if Asked.of(body).is_again else broken(body)) as server:
        call(capsys, server, "run", *cut, *words)
    with FakeOpenAI(FakeJudge()) as server:
        assert call(capsys, server, "run", *words)[0] == 0
    found = load_judged("a.jsonl").judgements
    assert len(found) == 6 and not any(judgement.faults for judgement in found)


def test_run_counts_an_episode_that_is_judged_again_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("judge.prices=prices.yaml", "judge.concurrency=1", "judge.retries=0", "-o", "a.jsonl")
    with FakeOpenAI(lambda _: failed(500)) as server:
        assert call(capsys, server, "run", *words)[0] == 0
    with FakeOpenAI(FakeJudge()) as server:
        status, said = call(capsys, server, "run", "--max-cost", "0.3", *words)
    assert status == 1 and "6 episodes are judged in a.jsonl" in said


def test_run_stopped_by_a_signal_continues(capsys: pytest.CaptureFixture[str]) -> None:
    fair, seen, lock = FakeJudge(), [0], threading.Lock()

    def script(body: Body) -> Answer:
        with lock:
            seen[0] += 1
            if seen[0] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        return fair(body)

    with FakeOpenAI(script) as server:
        status, said = call(capsys, server, "run", "-o", "a.jsonl", "judge.concurrency=1", "--where", "id=e*")
        assert status == 130 and "continue with: agent-rl judge run run rubric.yaml judge.model=m" in said
        stopped = len(load_judged("a.jsonl").judgements)
        assert 2 <= stopped < 6 and f"Stopped; {stopped} episodes are judged in a.jsonl" in said
        status, said = call(capsys, server, "run", "-o", "a.jsonl", "judge.concurrency=1")
        assert status == 0 and len(load_judged("a.jsonl").judgements) == 6
        answered_calls = Path("calls.jsonl").read_text().count('{"key"')
        assert answered_calls == 6 and len(server.asked) <= 7  # the one that the signal cut short, once more


def test_vocabulary_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: pytest.fail("it would be fetched"))
    assert estimate.vocabulary("gpt-4o") is None and estimate.vocabulary("smol") is None


def test_run_says_why_episodes_are_unscored(capsys: pytest.CaptureFixture[str]) -> None:
    said = "This model's maximum context length is 9 tokens"
    fair = FakeJudge()

    def script(body: Body) -> Answer:
        text = body["messages"][1]["content"]
        if "Which 1?" in text:
            return failed(400, said, code="context_length_exceeded")
        answer = fair(body)
        return answer if "Which 2?" in text else replace(answer, body=answer.body | {"usage": None})

    with FakeOpenAI(script) as server:
        for asked in (6, 1):  # a server of a longer context would take it
            before = len(server.asked)
            _, printed = call(capsys, server, "run")
            assert len(server.asked) - before == asked
            assert (
                "unscored: too_long (1)" in printed
                and f"too_long: the conversation is too long for m: {said}" in printed
            )
    assert "calls: 7 (6 of unknown tokens)" in printed


def test_judge_of_other_settings_is_refused_as_settings_are() -> None:
    with FakeOpenAI(FakeJudge()) as server:
        settings = {"model": "m", "base_url": server.url}
        with ModelJudge(JudgeConfig(**settings)) as one, ModelJudge(JudgeConfig(**settings, samples=3)) as other:
            found = judge_episodes("run", "rubric.yaml", one, out="a.jsonl")
            assert judge_episodes("run", "rubric.yaml", settings, out="a.jsonl").judgements == found.judgements
            with pytest.raises(ConfigError, match="was judged by another judge"):
                judge_episodes("run", "rubric.yaml", other, out="a.jsonl")
            panel = [Panel([one, judge]) for judge in (one, other)]
            assert panel[0].name == panel[1].name
            found = judge_episodes("run", "rubric.yaml", panel[1], out="b.jsonl")
            assert found.header.settings == {"members": [{}, {"samples": 3}]}
            with pytest.raises(ConfigError, match="was judged by another judge"):
                judge_episodes("run", "rubric.yaml", panel[0], out="b.jsonl")
