"""A judge under fire: thousands of criteria while everything goes wrong, and a run that is killed again and again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from agent_rl.core.episode import Episode
from agent_rl.core.judgement import Judgement
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.model import ModelJudge
from agent_rl.judge.rubric import Rubric
from agent_rl.judge.score import score
from agent_rl.policy import openai_client
from tests.fake_judge import PLANTED, UNANSWERED, WAYS, Asked, FakeJudge, answered, words_rubric
from tests.fake_openai import FakeOpenAI
from tests.forking import fork_server

pytestmark = pytest.mark.usefixtures("no_pause")

WORDS = ("alpha", "beta", "gamma", "delta", "omega", "kappa", "sigma", "theta", "lambda", "iota")
RUBRIC = words_rubric(WORDS)
PER_CALL = 4
CONCURRENCY = 16
NO_HANGS = tuple(way for way in WAYS if way != "hang")
FEW_HANGS = (*NO_HANGS * 3, "hang")
"""Each costs its whole timeout, which is to be a long one on a busy machine."""


def episodes(number: int) -> list[Episode]:
    """Responses that hold some of the words; each seventh holds what looks like a judge's reply."""
    generator = np.random.default_rng(7)
    words = [[w for w in WORDS if generator.random() < 0.5] for _ in range(number)]
    texts = [" ".join([f"number {i}:", *some, *([PLANTED] if i % 7 == 0 else [])]) for i, some in enumerate(words)]
    return [answered(text, id=f"e{i}") for i, text in enumerate(texts)]


def judge_all(
    url: str, some: list[Episode], rubric: Rubric, log: Path | None, config: dict[str, float]
) -> list[Judgement]:
    async def main(judge: ModelJudge) -> list[Judgement]:
        return await asyncio.gather(*(judge.judge(episode, rubric) for episode in some))

    openai_client.PAUSE = 0.0
    with ModelJudge(JudgeConfig(model="m", base_url=url, per_call=PER_CALL, **config), log) as judge:
        return asyncio.run(main(judge))


def outcome(judgement: Judgement) -> list[object]:
    return [judgement.episode, judgement.score, *(v.value if v.error is None else v.error for v in judgement.verdicts)]


@pytest.mark.parametrize(
    ("criteria", "ways", "timeout"),
    [(400, NO_HANGS, 60.0), pytest.param(10_000, FEW_HANGS, 30.0, marks=pytest.mark.sandbox)],
)
def test_judge_scores_nothing_wrongly_and_loses_nothing(
    criteria: int, ways: tuple[str, ...], timeout: float, capsys: pytest.CaptureFixture[str]
) -> None:
    some = episodes(criteria // len(WORDS))
    script = FakeJudge(ways, seed=3, lasting=0.3)
    with FakeOpenAI(script) as server:
        found = judge_all(server.url, some, RUBRIC, None, {"timeout": timeout, "retries": 2})
    wrong, faults = [], Counter[str]()
    for episode, judgement in zip(some, found, strict=True):
        parts = [RUBRIC.criteria[i : i + PER_CALL] for i in range(0, len(WORDS), PER_CALL)]
        expected = [value for part in parts for value in script.expected(episode.final_text, part)]
        faults.update(str(value) for value in expected if isinstance(value, str))
        got = outcome(judgement)[2:]
        wrong += [(episode.id, w, e) for w, e, g in zip(WORDS, expected, got, strict=True) if e != g]
        assert judgement.score == score(RUBRIC, judgement.verdicts)
        assert (judgement.score is None) == any(isinstance(value, str) for value in expected)
    assert not wrong
    assert Counter(str(v.error) for j in found for v in j.verdicts if v.error) == faults
    assert set(faults) == {str(WAYS[way][1]) for way in ways if WAYS[way][1]}, "each class of failures is met"
    assert sum(u.attempts for j in found for u in j.usage) == len(server.asked)
    with capsys.disabled():
        if criteria >= 10_000:
            print(f"\n{criteria} criteria, {len(server.asked)} requests, without a verdict: {dict(faults)}")


def judge_into(url: str, some: list[Episode], log: Path, out: Path) -> None:
    found = judge_all(url, some, RUBRIC, log, {"timeout": 60.0, "retries": 9, "concurrency": CONCURRENCY})
    out.write_text(json.dumps([outcome(judgement) for judgement in found]))


def answers_in(log: Path) -> set[str]:
    lines = [line for line in log.read_bytes().split(b"\n")[:-1] if line.startswith(b'{"key"')] if log.exists() else []
    return {json.dumps(json.loads(line)["request"], sort_keys=True) for line in lines}


def failing(script: FakeJudge, bodies: Iterable[str]) -> set[str]:
    """Return the requests that the server doesn't answer, so that each run makes them again."""
    asked = ((body, Asked.of(json.loads(body))) for body in bodies)
    return {body for body, a in asked if script.way_of(a.response, a.own)[0] in UNANSWERED}


@pytest.mark.sandbox
def test_judge_killed_and_resumed_makes_no_call_twice(tmp_path: Path) -> None:
    kills, generator = 20, np.random.default_rng(11)
    some = episodes(3 * kills)
    log, out, undisturbed = (tmp_path / name for name in ("calls.jsonl", "out.json", "undisturbed.json"))
    context = fork_server("agent_rl.judge.model", "openai", "tests.test_judge_bars")
    script = FakeJudge(NO_HANGS, seed=5, lasting=0.3)
    killed, repeated, before = 0, 0, set[str]()
    with FakeOpenAI(script) as server:
        for round in range(kills + 1):
            known, first = answers_in(log), len(server.asked)
            run = context.Process(target=judge_into, args=(server.url, some, log, out))
            run.start()
            until = first + int(generator.integers(1, 20))
            while round < kills and run.is_alive() and len(server.asked) < until:
                time.sleep(0.001)
            if round < kills and run.pid is not None and run.is_alive():
                os.kill(run.pid, signal.SIGKILL)
                killed += 1
            run.join()
            asked = {json.dumps(body, sort_keys=True) for body in server.asked[first:]}
            assert not known & asked, "an answer in the log is never asked for again"
            repeated += len(before & asked - failing(script, before))
            before |= asked
    assert killed == kills and out.exists()
    assert repeated <= kills * CONCURRENCY, "what the kills cut off"
    with FakeOpenAI(FakeJudge(NO_HANGS, seed=5, lasting=0.3)) as server:
        judge_into(server.url, some, tmp_path / "other.jsonl", undisturbed)
    assert json.loads(out.read_text()) == json.loads(undisturbed.read_text())
