"""Dialogues: users with a script or a model, environments that talk to them, and support-v0."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from doubles import small_renderer
from fake_openai import FakeOpenAI
from fake_openai import failed as down
from fake_openai import said as served

import agent_rl as ar
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.envs.quiz import one_call
from agent_rl.envs.support import KINDS, RESULTS, Support, generate
from agent_rl.gym.dialogue import UserScript
from agent_rl.gym.registry import spec
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy import Reply, Scripted, TokenPolicy, demonstrator, oracle
from agent_rl.policy.user import _close_policies, model_user
from agent_rl.rollout import Job, run_episode, run_jobs, summarise


def said(*texts: str) -> list[ar.Message]:
    """Return a dialogue that the user begins."""
    return [ar.Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]


def play(
    env: ar.EnvSpec, task: ar.Task, *answers: str | ar.Message, seconds: float | None = None, **env_args: ar.JSON
) -> ar.Episode:
    script = Scripted(lambda env, seed: (answer for answer in answers))
    budget = ar.Budget(turns=len(answers), seconds=seconds)
    return asyncio.run(run_episode(Job(env, task, 0, env_args=env_args, budget=budget), script))


# scripted users


def test_scripted_user_replies_until_none_are_left() -> None:
    user = ar.ScriptedUser(["I want it back.", "Yes."])
    assert [user.reply(said(*"abcdef"[:n])) for n in (0, 2, 4)] == ["I want it back.", "Yes.", None]


def test_scripted_user_answers_all_rules_found() -> None:
    user = ar.ScriptedUser(["Help!", "Bye."], {"name": "I am Ada.", r"\bnumber\b": "It is 7."})
    assert user.reply(said("Help!", "NAME and number?")) == "I am Ada. It is 7."
    assert user.reply(said("Help!", "name?", "I am Ada.", "done")) == "Bye."  # a rule uses up no reply
    assert user.reply(said("Help!", "name?", "I am Ada.", "done", "Bye.", "done")) is None


def test_scripted_user_plays_a_script() -> None:
    def script() -> UserScript:
        heard = yield "Help!"
        while "?" in heard.content:
            heard = yield f"No {heard.content}"

    user = ar.ScriptedUser(script)
    assert user.reply(()) == "Help!"
    assert [user.reply(said("Help!", "why?", "No why?", last)) for last in ("how?", "done")] == ["No how?", None]


# users that are policies


@dataclass
class Recorded:
    """A policy that says one thing after the other, and keeps what it was given."""

    replies: list[str | Exception]
    seen: list[list[ar.Message]] = field(default_factory=list)
    closed: int = 0
    context_limit: int | None = None
    trajectories: tuple[ar.Trajectory, ...] = ()
    finish: ar.FinishReason = ar.FinishReason.STOP

    def start(self, tools: Sequence[ToolSpec], seed: int) -> Recorded:
        self.seen.append([])
        return self

    def observe(self, messages: Sequence[ar.Message]) -> int:
        self.seen[-1] += messages
        return 7

    async def reply(self, max_tokens: int | None = None) -> Reply:
        reply = self.replies[len(self.seen) - 1]
        if isinstance(reply, Exception):
            raise reply
        await asyncio.sleep(60 if reply == "slow" else 0)
        return Reply(ar.Message("assistant", reply), self.finish)

    def close(self) -> None:
        self.closed += 1


def told(policy: ar.Policy, *texts: str, seconds: float | None = 30) -> str | None:
    return asyncio.run(ar.ModelUser(policy, "You are Ada.", seconds=seconds).reply(said(*texts)))


def test_model_user_sees_the_sides_swapped() -> None:
    policy = Recorded(["I want it back.", "Bye. ###STOP###"])
    assert told(policy) == "I want it back."
    assert told(policy, "I want it back.", "done") is None
    system, greeting = ar.Message("system", "You are Ada."), ar.Message("user", "Hi! How can I help you today?")
    own, heard = ar.Message("assistant", "I want it back."), ar.Message("user", "done")
    assert policy.seen == [[system, greeting], [system, greeting, own, heard]] and policy.closed == 2


def test_failing_model_user_is_named() -> None:
    for policy, reason in (
        (Recorded([ConnectionError("refused")]), "could not answer: ConnectionError: refused"),
        (Recorded(["I wa"], finish=ar.FinishReason.LENGTH), "was cut"),
        (Recorded(["hello"], context_limit=7), "no room"),
        (Recorded([TimeoutError("the endpoint")]), "TimeoutError: the endpoint"),
    ):
        with pytest.raises(ar.UserError, match=reason):
            told(policy)
        assert policy.closed == 1
    with pytest.raises(ar.UserError, match="took more than"):
        told(Recorded(["slow"]), seconds=0.01)


def test_failed_user_fails_the_episode_without_a_score() -> None:
    class Talk(ar.DialogueEnv):
        async def reset(self, task: ar.Task, rng: np.random.Generator) -> tuple[ar.Message, ...]:
            self.user = ar.ModelUser(
                Recorded(["hello", "slow" if task else ConnectionError("refused")]), "You are Ada."
            )
            return await self.open_dialogue()

        @ar.reward
        def good(self, episode: ar.Episode) -> float:
            return 0.0

    ar.register("dialogue-test/talk-v0")(Talk)
    episode = play(spec("dialogue-test/talk-v0"), {}, "hello", "bye")
    assert (episode.outcome, episode.reward, episode.rewards) == (ar.Outcome.FAILED, None, ())
    assert episode.error is not None and episode.error.type == "UserError"
    assert [m.content for m in episode.messages] == ["hello", "hello"]
    hung = play(spec("dialogue-test/talk-v0"), {"slow": True}, "hello", "bye", seconds=0.2)
    assert (hung.outcome, hung.reward) == (ar.Outcome.FAILED, None)  # in spite of the budget, which cuts others


def test_model_user_closes_policies_of_ended_loops() -> None:
    def played(loop: asyncio.AbstractEventLoop) -> ar.Policy:
        async def begun() -> ar.Policy:
            users = [model_user("openai", {"model": "m", "base_url": server.url}, "", "support-v0") for _ in range(2)]
            assert users[0].policy is users[1].policy
            return users[0].policy

        return loop.run_until_complete(begun())

    def clients() -> int:
        return sum(thread.name == "openai" for thread in threading.enumerate())

    with FakeOpenAI() as server, contextlib.closing(asyncio.new_event_loop()) as living:
        before, own = clients(), played(living)
        for _ in range(3):
            with contextlib.closing(asyncio.new_event_loop()) as ended:
                assert played(ended) is not own
        assert played(living) is own
        assert clients() == before + 1
    _close_policies()
    assert clients() == before


def test_token_policy_plays_a_user() -> None:
    renderer = small_renderer()
    script = [renderer.reply(ar.Message("assistant", "It is 4821."))]
    assert told(TokenPolicy(ScriptedEngine(script), renderer), "I want it back.", "number?") == "It is 4821."


# support-v0

SPEC = spec("support-v0")
TASKS = {kind: SPEC.tasks.get("eval", i) for i, kind in enumerate(KINDS)}
ASK = "Your order's number and your name?"


def facts(kind: str) -> tuple[int, str, int, int, str]:
    """Return the number, the customer's name, the price, the days and the owner of an order."""
    orders, number, name = generate(int(str(TASKS[kind]["seed"])), kind)
    order = orders[number]
    return number, name, order.price, order.days, order.name


@pytest.mark.parametrize("split", SPEC.tasks.splits)
def test_support_oracle_resolves_every_task(split: str) -> None:
    played = asyncio.run(run_jobs([Job(SPEC, SPEC.tasks.get(split, i), i) for i in range(50)], oracle()))
    assert {episode.reward for episode in played} == {1.0}
    assert {episode.final_text.split()[0] for episode in played} == set(RESULTS.values())


def test_support_demonstrations_often_fail() -> None:
    played = asyncio.run(run_jobs([Job(SPEC, SPEC.tasks.get("train", i), i) for i in range(100)], demonstrator()))
    assert 0.25 < summarise(played).success.value < 0.7 and not any(episode.error for episode in played)


def test_support_splits_share_no_seed() -> None:
    parts = [{SPEC.tasks.get(split, i)["seed"] for i in range(200)} for split in ("train", "eval", "dev")]
    assert len(set.union(*parts)) == 600


def test_support_customer_answers_only_what_is_asked() -> None:
    number, name, *_ = facts("open")
    episode = play(SPEC, TASKS["open"], "The order number?", "And your name?", "Which colour?", "I will look.")
    heard = [m.content for m in episode.messages if m.role == "user"]
    assert heard[0].startswith("I do not want the ") and str(number) not in heard[0] and name not in heard[0]
    assert heard[1:] == [f"It is {number}.", f"I am {name}.", "I do not know."]
    assert episode.outcome is ar.Outcome.TERMINATED and episode.reward == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_support_wants_the_database_and_the_words(kind: str) -> None:
    number, _, price, days, _ = facts(kind)
    write = {
        "stranger": one_call("flag_order", number=number),
        "open": one_call("cancel_order", number=number),
        "delivered": one_call("refund_order", number=number, amount=price),
    }
    result = RESULTS[kind] + {"sent": f" {days}", "late": f" {days}", "delivered": f" {price}"}.get(kind, "")
    right = [ASK, *([write[kind]] if kind in write else []), f"It is {result}, goodbye."]
    harm = one_call("refund_order", number=number, amount=1)
    assert play(SPEC, TASKS[kind], *right).reward == 1.0
    assert play(SPEC, TASKS[kind], right[0], harm, *right[1:]).reward == 0.0  # a database that no rule asked for
    assert play(SPEC, TASKS[kind], "The number?", *right[1:]).reward == 0.0  # the name was never asked for
    assert play(SPEC, TASKS[kind], *right[:-1], "It is done.").reward == 0.0
    assert play(SPEC, TASKS[kind], *right[:-1], f"{result}, or {' '.join(RESULTS.values())}").reward == 0.0
    assert play(SPEC, TASKS[kind], ASK, right[-1]).reward == float(kind not in write)


def test_support_tells_a_stranger_nothing() -> None:
    number, _, price, days, owner = facts("stranger")
    flag = one_call("flag_order", number=number)
    for leak, reward in ((owner, 0.0), (str(price), 0.0), (str(days), 0.0), (str(number), 1.0)):
        assert play(SPEC, TASKS["stranger"], ASK, f"Is it {leak}?", flag, "flagged").reward == reward


def test_support_snapshot_continues_the_same_dialogue() -> None:
    async def states() -> list[str]:
        env, other = Support(), Support()
        for each in (env, other):
            await each.reset(TASKS["open"], np.random.default_rng(0))
        await env.step(ar.Message("assistant", ASK))
        other.restore(env.snapshot())
        for each in (env, other):
            await each.step(one_call("find_order", number=each.number))
            await each.step(one_call("cancel_order", number=each.number))
        return [env.state_hash(), other.state_hash()]

    first, second = asyncio.run(states())
    assert first == second and "cancelled" in first


def test_support_customer_is_any_policy_by_name() -> None:
    @ar.register_policy("dialogue-test-customer")
    def customer(number: int) -> Recorded:
        return Recorded(["I want my money back.", f"It is {number}.", "###STOP###"])

    args = {"user": "dialogue-test-customer", "user_args": {"number": 7}}
    episode = play(SPEC, TASKS["open"], "Number?", "cancelled", **args)
    assert [m.content for m in episode.messages if m.role == "user"] == ["I want my money back.", "It is 7."]
    assert episode.outcome is ar.Outcome.TERMINATED
    refused = play(SPEC, TASKS["open"], "Number?", user="oracle")
    assert refused.error is not None and refused.error.type == "ConfigError" and "script" in refused.error.message


def test_support_customer_is_served_by_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    number, name, *_ = facts("open")
    talk = ["I do not want it.", f"{number}, {name}.", "Thanks ###STOP###"]
    with FakeOpenAI([*map(served, talk), served(talk[0]), down(500)]) as server:
        args = {"user": "openai", "user_args": {"model": "m", "base_url": server.url, "retries": 0}}
        episode = play(SPEC, TASKS["open"], ASK, one_call("cancel_order", number=number), "cancelled", **args)
        failed = play(SPEC, TASKS["open"], ASK, "cancelled", **args)
    assert episode.reward == 1.0 and episode.outcome is ar.Outcome.TERMINATED
    system, greeting, own, heard = server.asked[1]["messages"]
    assert name in system["content"] and greeting["role"] == heard["role"] == "user" and heard["content"] == ASK
    assert own == {"role": "assistant", "content": "I do not want it."}
    assert failed.error is not None and failed.error.type == "UserError" and failed.reward is None
