"""EvolvingJudge: from when on proposals count, its state and failures, and what a model is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from agent_rl.core.episode import Episode, EpisodeGroup, Origin, Purpose
from agent_rl.core.judgement import Judgement, Verdict
from agent_rl.core.messages import Message, Task
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.judge.calling import Caller
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.evolving import EvolvingJudge, ProposalError
from agent_rl.judge.proposing import propose, read_proposals
from agent_rl.judge.rubric import Criterion, Rubric
from agent_rl.judge.score import score
from tests.doubles import example_episode
from tests.fake_openai import Answer, FakeOpenAI, failed, said

RUBRIC = Rubric("words", (Criterion("alpha", 'It contains the word "alpha".'),))
BETA, GAMMA = (Criterion("p", f'It contains the word "{word}".', w) for word, w in (("beta", 1.0), ("gamma", -1.0)))
TASK: Task = {"n": 1}
ANSWERS = ("alpha", "alpha beta", "gamma", "alpha")


class Words:
    """A judge that finds a criterion's word."""

    name = "words"
    closed = False

    async def judge(self, episode: Episode, rubric: Rubric) -> Judgement:
        found = [(c.id, c.text.split('"')[1] in episode.final_text) for c in rubric.criteria]
        verdicts = tuple(Verdict(id, "yes" if met else "no", float(met)) for id, met in found)
        return Judgement(rubric.label, self.name, verdicts, score(rubric, verdicts), episode.id)

    def close(self) -> None:
        self.closed = True


class Proposes:
    """Proposes what it is given, one visit after the other."""

    def __init__(self, *visits: Sequence[Criterion] | Exception) -> None:
        self.visits: Iterator[Sequence[Criterion] | Exception] = iter(visits)
        self.seen: list[list[str]] = []

    async def __call__(self, group: EpisodeGroup, rubric: Rubric) -> Sequence[Criterion]:
        self.seen.append([c.text.split('"')[1] for c in rubric.criteria])
        given = next(self.visits)
        if isinstance(given, Exception):
            raise given
        return given


def visit(
    judge: EvolvingJudge,
    step: int = 0,
    *,
    task: Task = TASK,
    answers: Sequence[str] = ANSWERS,
) -> tuple[list[float | None], dict[str, float]]:
    """Judge a group of training and learn from it; return its scores and the metrics."""

    async def visited() -> tuple[list[float | None], dict[str, float]]:
        group = await judged(judge, answers, task, "train", step)
        return [e.judgements[0].score for e in group.episodes], await judge.learn([group])

    return asyncio.run(visited())


async def judged(
    judge: EvolvingJudge, answers: Sequence[str], task: Task, purpose: Purpose, step: int = 0
) -> EpisodeGroup:
    episodes = []
    for i, answer in enumerate(answers):
        messages = (Message("user", "Which letters?"), Message("assistant", answer))
        plain = example_episode(f"e{i}", task=task, origin=Origin(purpose, "train", step), messages=messages, steps=())
        episodes.append(replace(plain, judgements=(await judge.judge(plain, RUBRIC),)))
    return EpisodeGroup("g", tuple(episodes))


def test_proposals_count_from_the_next_visit() -> None:
    proposes = Proposes([BETA, GAMMA], [BETA])
    judge = EvolvingJudge(Words(), proposes)
    first, metrics = visit(judge, 3)
    assert first == [1.0, 1.0, 0.0, 1.0]
    assert metrics["judge/criteria_proposed"] == metrics["judge/criteria_active"] == 2.0
    second, _ = visit(judge, 4)
    assert second == [0.5, 1.0, -0.5, 0.5]  # of two positive weights
    assert proposes.seen == [["alpha"], ["alpha", "beta", "gamma"]]
    (buffer,) = judge.buffers.values()
    assert [known.criterion.source for known in buffer.active] == ["evolved@3"] * 2 and buffer.visits == 2
    evaluated = asyncio.run(judged(judge, ANSWERS, TASK, "eval"))
    assert [e.judgements[0].score for e in evaluated.episodes] == first
    assert {e.judgements[0].rubric for e in evaluated.episodes} == {RUBRIC.label}


def test_tasks_with_one_question_have_buffers_of_their_own() -> None:
    judge = EvolvingJudge(Words(), Proposes([BETA], []))
    visit(judge)
    scores, metrics = visit(judge, task={"n": 2})
    assert scores == [1.0, 1.0, 0.0, 1.0] and metrics["judge/criteria_active"] == 0.0
    assert len(judge.buffers) == 2


def test_criteria_without_variance_retire() -> None:
    judge = EvolvingJudge(Words(), Proposes([BETA], [], [], []))
    visit(judge)
    same = ("alpha beta", "alpha beta gamma")
    assert [visit(judge, answers=same)[1]["judge/criteria_retired"] for _ in range(3)] == [0.0, 1.0, 0.0]
    assert visit(judge, answers=["alpha", "alpha"])[0] == [1.0, 1.0]  # and equal answers are no contrast to ask about


def test_failed_proposals_are_counted_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    judge = EvolvingJudge(Words(), Proposes(ProposalError("timeout: too late"), [BETA], ConfigError("no such key")))
    _, metrics = visit(judge)
    assert metrics["judge/proposals_failed"] == 1.0 and "group g: timeout: too late" in caplog.text
    assert visit(judge)[1]["judge/criteria_active"] == 1.0
    with pytest.raises(ConfigError, match="no such key"):
        visit(judge)


def test_state_restores_buffers() -> None:
    judge, other = (EvolvingJudge(Words(), Proposes([BETA, GAMMA], [])) for _ in range(2))
    visit(judge)
    visit(judge)
    other.restore(json.loads(json.dumps(judge.state())))
    assert other.buffers == judge.buffers and asyncio.run(other.learn([]))["judge/criteria_active"] == 0.0
    with pytest.raises(CheckpointError, match="criteria are damaged"):
        other.restore({"k": {"task": 3, "active": "all"}})
    judge.close()


# --- what a model proposes ---


def asked_of(script: Answer, retries: int = 0) -> tuple[tuple[Criterion, ...] | str, FakeOpenAI]:
    with FakeOpenAI([script]) as server:
        caller = Caller(JudgeConfig(model="m", base_url=server.url, retries=retries))
        group = asyncio.run(judged(EvolvingJudge(Words(), Proposes()), ANSWERS, TASK, "train"))
        try:
            return asyncio.run(propose(caller, group, RUBRIC)), server
        except ProposalError as error:
            return str(error), server
        finally:
            caller.close()


def test_propose_shows_task_responses_and_criteria() -> None:
    found, server = asked_of(said('{"positive": ["Names beta.", " "], "negative": ["Names gamma."]}'))
    assert not isinstance(found, str)
    assert [(c.text, c.weight) for c in found] == [("Names beta.", 1.0), ("Names gamma.", -1.0)]
    (body,) = server.asked
    shown = body["messages"][1]["content"]
    assert all(f'\n"{answer}"' in shown for answer in ANSWERS) and "Which letters?" in shown
    assert shown.endswith('Criteria in use:\n- It contains the word "alpha".') and "weight" not in shown
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["positive", "negative"]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (said("I would rather not."), "holds no object"),
        (said("{" * 200_000 + '{"positive": ["Names beta."]}'), "holds no object"),
        (said('{"positive": "Names beta."}'), "no lists of texts"),
        (said('{"positive": ["Names', "length"), "cut: length"),
        (said(None, refusal="I can't."), "I can't."),
        (failed(500), "server: "),
    ],
)
def test_propose_without_criteria_says_why(reply: Answer, why: str) -> None:
    found, _ = asked_of(reply)
    assert isinstance(found, str) and why in found


def test_proposals_are_found_in_prose() -> None:
    text = '<think>{"positive": ["x"]}</think> Here {so}:\n```json\n{"negative": ["Names gamma."], "positive": []}\n```'
    assert [(c.text, c.weight) for c in read_proposals(text)] == [("Names gamma.", -1.0)]


def test_proposal_with_half_a_character_can_be_evolved() -> None:
    judge = EvolvingJudge(Words(), Proposes(read_proposals('{"positive": ["Names \\ud83d beta."]}')))
    visit(judge)
    (buffer,) = judge.buffers.values()
    assert [known.criterion.text for known in buffer.active] == ["Names ? beta."]
    with pytest.raises(ConfigError, match="holds half a character"):
        Criterion("c", "Names \ud83d beta.")
