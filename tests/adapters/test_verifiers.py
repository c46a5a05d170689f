"""Environments of the installed verifiers 0.1, played through the adapter."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset
from verifiers.clients import Client

import agent_rl as ar
from agent_rl.envs.quiz import one_call
from agent_rl.policy import Scripted
from agent_rl.policy.base import Reply

ROWS = Dataset.from_list(
    [{"question": f"{n} + {n + 1}?", "answer": str(2 * n + 1), "info": {"n": n}} for n in range(12)]
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def correct(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def used_tool(completion: Any, state: vf.State, info: dict[str, int]) -> float:
    await asyncio.sleep(0)
    assert f"{info['n']} +" in state["prompt"][-1]["content"]
    return float(any(message["role"] == "tool" for message in completion))


def tool_env(**options: Any) -> vf.Environment:
    rubric = vf.Rubric(funcs=[correct, used_tool], weights=[1.0, 0.1])
    return vf.ToolEnv(dataset=ROWS, tools=[add], rubric=rubric, system_prompt="Add.", max_turns=4, **options)


class Sums(ar.from_verifiers(tool_env())):  # type: ignore[misc]
    def oracle(self) -> ar.Script:
        n = self.state["info"]["n"]
        (found,) = yield one_call("add", a=n, b=n + 1)
        yield found.content


def test_tool_env_is_played_and_scored() -> None:
    ar.register("verifiers-test/sums-v0")(Sums)
    (episode,) = ar.run("verifiers-test/sums-v0", n=1)
    assert [m.role for m in episode.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [(r.name, r.value, r.weight) for r in episode.rewards[:2]] == [
        ("correct", 1.0, 1.0),
        ("used_tool", 1.0, 0.1),
    ]
    assert episode.reward == 1.1 and episode.value("total_tool_calls") == 1 and episode.value("num_turns") == 2
    report = ar.check("verifiers-test/sums-v0", n=4)
    assert not report.findings and report.score("oracle", "eval").success.value == 1.0


def test_bad_calls_and_endless_ones_end_as_they_do_there() -> None:
    ar.register("verifiers-test/sums-v0")(Sums)

    def bad(env: ar.Env, seed: int) -> ar.Script:
        (answer,) = yield one_call("sub", a=1)
        assert "sub" in answer.content
        (answer,) = yield one_call("add", a=1)
        assert "missing 1 required positional argument" in answer.content
        for _ in range(2):
            yield one_call("add", a=1, b=2)

    (episode,) = ar.run("verifiers-test/sums-v0", Scripted(bad))
    assert (episode.stop_reason, episode.value("num_turns")) == (ar.StopReason.ENV_TRUNCATED, 4)


class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
    """Guess a number."""

    async def setup_state(self, state: vf.State) -> None:
        state["left"] = 5

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        state["left"] -= 1
        said = messages[-1]["content"]
        reply = [{"role": "user", "content": "more" if said < state["answer"] else "less"}]
        if said == state["answer"]:
            state["final_env_response"] = reply = [{"role": "user", "content": "yes"}]
        return reply

    @vf.stop
    async def gave_up(self, state: vf.State) -> bool:
        return bool(state["left"] == 0)

    @vf.cleanup
    async def tidy(self, state: vf.State) -> None:
        TIDIED.append(state["answer"])


TIDIED: list[str] = []


def best(completions: Any, answers: list[str]) -> list[float]:
    lengths = [len(completion) for completion in completions]
    return [float(n == min(lengths)) for n in lengths]


def test_responses_stops_clean_up_and_groups_work() -> None:
    rows = Dataset.from_list([{"question": "Which digit?", "answer": "7"}])
    rubric = vf.Rubric(funcs=[lambda completion, **_: float(completion[-1]["content"] == "yes"), best])
    ar.register("verifiers-test/guess-v0")(ar.from_verifiers(Guess(dataset=rows, eval_dataset=rows, rubric=rubric)))

    def counting(env: ar.Env, seed: int) -> ar.Script:
        for n in range(7 - seed % 2, 8):
            yield str(n)

    group = ar.run("verifiers-test/guess-v0", Scripted(counting), samples=6)
    assert all(episode.outcome is ar.Outcome.TERMINATED and episode.messages[-1].content == "yes" for episode in group)
    assert {(episode.turns, episode.reward) for episode in group} == {(1, 2.0), (2, 1.0)} and len(TIDIED) == 6
    (lost,) = ar.run("verifiers-test/guess-v0", "empty")
    assert (lost.turns, lost.value("<lambda>"), lost.outcome) == (6, 0.0, ar.Outcome.TERMINATED)  # as it does below


class Replies(Client):  # type: ignore[misc, type-arg]
    """Gives the replies of an episode to verifiers' own loop."""

    def __init__(self, episode: ar.Episode) -> None:
        super().__init__(None)
        self.left = [message for message in episode.messages if message.role == "assistant"]

    async def get_response(self, *args: Any, **kwargs: Any) -> vf.Response:
        said = self.left.pop(0)
        calls = [{"id": c.id, "name": c.name, "arguments": json.dumps(dict(c.arguments))} for c in said.tool_calls]
        message = {"content": said.content, "tool_calls": calls or None, "finish_reason": "stop", "is_truncated": False}
        return vf.Response(id="", created=0, model="", message=message)


for _name in Client.__abstractmethods__:
    setattr(Replies, _name, None)
Replies.__abstractmethods__ = frozenset()


def test_episodes_and_scores_are_those_of_verifiers() -> None:
    rows = Dataset.from_list([{"question": "Which digit?", "answer": "7"}])
    guess = Guess(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion: float(len(completion))], weights=[0.5]))
    for foreign, policies in ((tool_env(), ("random", "empty", "nothing")), (guess, ("random", "empty"))):
        ar.register("verifiers-test/same-v0")(type("Same", (ar.from_verifiers(foreign),), {}))
        for policy in policies:
            for episode in ar.run("verifiers-test/same-v0", policy, n=4):
                replies = Replies(episode)
                state = asyncio.run(foreign._run_rollout_state(dict(episode.task), replies, "", {}))
                said = [(m.role, m.content or "") for m in (*state["prompt"], *state["completion"])]
                assert not replies.left and [(m.role, m.content) for m in episode.messages] == said
                assert episode.reward == pytest.approx(state["reward"])
                assert {r.name: r.value for r in episode.rewards} == state["metrics"]


class Cut:
    """Gives a reply that hits its limit; implements `Policy` and `Conversation`."""

    context_limit, trajectories = None, ()

    def start(self, tools: Any, seed: int) -> Cut:
        return self

    def observe(self, messages: Any) -> int:
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        return Reply(ar.Message("assistant", "7"), ar.FinishReason.LENGTH)

    def close(self) -> None:
        pass


def test_rubric_sees_a_reply_that_was_cut() -> None:
    rows = Dataset.from_list([{"question": "Which digit?", "answer": "7"}])
    rubric = vf.Rubric(funcs=[correct, lambda completion, **_: float(len(completion))])
    for foreign in (
        vf.SingleTurnEnv(dataset=rows, rubric=rubric),
        vf.ToolEnv(dataset=rows, tools=[add], rubric=rubric),
    ):
        ar.register("verifiers-test/cut-v0")(type("Cut", (ar.from_verifiers(foreign),), {}))
        (episode,) = ar.run("verifiers-test/cut-v0", Cut(), n=1)
        assert (episode.stop_reason, [r.value for r in episode.rewards[:2]]) == (ar.StopReason.LENGTH, [1.0, 1.0])


def test_single_turn_and_failures() -> None:
    def raising(completion: Any) -> float:
        raise ConnectionError("the judge is gone")

    good, bad = (vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[f])) for f in (correct, raising))
    ar.register("verifiers-test/single-v0")(ar.from_verifiers(good))
    (episode,) = ar.run("verifiers-test/single-v0", {"name": "constant", "text": "1"})
    assert (episode.outcome, episode.turns) == (ar.Outcome.TERMINATED, 1)
    ar.register("verifiers-test/judged-v0")(type("Judged", (ar.from_verifiers(bad),), {}))
    (episode,) = ar.run("verifiers-test/judged-v0", "empty")
    assert episode.reward is None and episode.error is not None and "the judge is gone" in episode.error.message
    with pytest.raises(ar.ConfigError, match="EnvGroup"):
        ar.from_verifiers(vf.EnvGroup(envs=[good, bad]))
