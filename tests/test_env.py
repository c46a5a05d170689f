"""agent_rl.gym.env: declarations, steps, scores, budgets."""

import asyncio
import dataclasses
import inspect

import numpy as np
import pytest

from agent_rl.concurrency import maybe_await
from agent_rl.core.episode import Episode, Origin, Outcome, Reward, StopReason
from agent_rl.core.messages import Message, Step, ToolCall
from agent_rl.errors import ConfigError, DefinitionError, SandboxError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, ToolEnv, messages_of
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import tool


@tool(inline=True)
def shout(text: str) -> str:
    """Make it loud."""
    return text.upper()


class Shop(ToolEnv):
    extra_tools = (shout,)

    def reset(self, task, rng):
        self.answer = task["answer"]
        return task["question"]

    @tool(inline=True)
    def price(self, item: str) -> int:
        """Look up a price."""
        return len(item)

    @tool
    async def wait(self) -> str:
        return self.answer

    @reward(weight=2)
    def correct(self, episode) -> bool:
        return episode.final_text == self.answer

    @reward(weight=0, name="turns")
    async def count(self, episode) -> int:
        return episode.turns


def episode(text: str = "4") -> Episode:
    messages = (Message("user", "?"), Message("assistant", text))
    return Episode(
        "e", "shop-v0", {}, 0, "g", Origin("rollout"), messages, (), (), (), StopReason.DONE, Outcome.TERMINATED
    )


def score(env: Env) -> tuple[Reward, ...]:
    return asyncio.run(env.score(episode()))


# Steps


def opened() -> Shop:
    shop = Shop()
    shop.reset({"question": "2+2?", "answer": "4"}, np.random.default_rng(0))
    return shop


def test_tools_list_methods_before_extra_tools():
    assert [t.name for t in Shop().tools] == ["price", "wait", "shout"]


def test_tool_calls_are_answered_in_order():
    calls = (ToolCall("a", "wait"), ToolCall("b", "price", {"item": "abc"}), ToolCall("c", "shout", {"text": "x"}))
    step = asyncio.run(opened().step(Message("assistant", tool_calls=calls)))
    assert [m.content for m in step.observation] == ["4", "3", "X"]
    assert not step.terminated
    assert not step.truncated


def test_tool_env_ends_at_a_plain_message():
    assert asyncio.run(opened().step(Message("assistant", "4"))) == Step(terminated=True)


@pytest.mark.parametrize("is_async", [True, False])
def test_on_answer_continues_the_dialogue(is_async):
    class Sync(Shop):
        def on_answer(self, action):
            return Step((Message("user", "continue"),))

    class Async(Shop):
        async def on_answer(self, action):
            return Step((Message("user", "continue"),))

    env = Async() if is_async else Sync()
    assert asyncio.run(env.step(Message("assistant", "4"))).observation[0].content == "continue"


def test_toolbox_may_differ_by_instance():
    class Choosy(Shop):
        @property
        def toolbox(self):
            return {"shout": shout}

    assert [t.name for t in Choosy().tools] == ["shout"]
    step = asyncio.run(Choosy().step(Message("assistant", tool_calls=(ToolCall("a", "price", {"item": "x"}),))))
    assert step.observation[0].tool_error == "unknown_tool"


def test_infrastructure_errors_leave_step():
    class Lost(Shop):
        @tool
        def wait(self) -> str:
            raise SandboxError("gone")

    with pytest.raises(SandboxError):
        asyncio.run(Lost().step(Message("assistant", tool_calls=(ToolCall("a", "wait"),))))


def test_env_names_missing_methods():
    env = Env()
    rng = np.random.default_rng(0)
    for use in (
        lambda: env.reset({}, rng),
        lambda: env.step(Message("assistant")),
        env.oracle,
        lambda: env.demonstrate(rng),
    ):
        with pytest.raises(NotImplementedError, match="Env has"):
            use()
    assert env.close() is None
    assert env.tools == ()


# Inheritance


def test_overriding_by_name_replaces_in_place():
    class Dear(Shop):
        @tool(inline=True)
        def price(self, item: str) -> int:
            """Look up a high price."""
            return 1000

        @reward(weight=3)
        def correct(self, episode):
            return 0.5

    assert [t.name for t in Dear().tools] == ["price", "wait", "shout"]
    assert Dear().tools[0].description == "Look up a high price."
    assert Shop().tools[0].description == "Look up a price."
    assert score(Dear())[0] == Reward("correct", 0.5, 3)


def test_override_by_none_removes_tools_and_rewards():
    class Bare(Shop):
        price = None
        correct = None
        extra_tools = ()

    assert [t.name for t in Bare().tools] == ["wait"]
    assert [c.name for c in Bare.reward_components] == ["turns"]


def test_overriding_without_the_decorator_is_a_definition_error():
    with pytest.raises(DefinitionError, match=r"Forgot\.price overrides .* @tool"):

        class Forgot(Shop):
            def price(self, item: str) -> int:
                return 1

    with pytest.raises(DefinitionError, match=r"Forgot2\.correct overrides .* @reward"):

        class Forgot2(Shop):
            def correct(self, episode):
                return 1


def test_mixin_adds_tools_and_rewards():
    class Brevity:
        @reward(weight=0.1)
        def brief(self, episode):
            return len(episode.final_text) < 10

        @tool(inline=True)
        def hint(self) -> str:
            return "short"

    class Both(Brevity, Shop):
        pass

    assert {c.name for c in Both.reward_components} == {"correct", "turns", "brief"}
    assert "hint" in [t.name for t in Both().tools]


def test_reward_in_place_of_a_method_is_a_definition_error():
    with pytest.raises(
        DefinitionError, match=r'Grade.score is a reward in the place of Env.score.* @ar.reward\(name="score"\)'
    ):

        class Grade(Env):
            @reward
            def score(self, episode):
                return 1.0


def test_tool_in_place_of_a_method_is_a_definition_error():
    with pytest.raises(
        DefinitionError, match=r'Walk.step is a tool in the place of ToolEnv.step.* @tool\(name="step"\)'
    ):

        class Walk(Shop):
            @tool
            def step(self, direction: str) -> str:
                return direction

    class Named(Shop):
        @tool(name="step")
        def walk(self, direction: str) -> str:
            return direction

    assert "step" in [t.name for t in Named().tools]


def test_duplicate_names_are_a_definition_error():
    with pytest.raises(DefinitionError, match="two tools called 'price'"):

        class TwoTools(Shop):
            @tool(name="price")
            def cost(self) -> int:
                return 1

    with pytest.raises(DefinitionError, match=r"\.correct and \.right are both rewards called 'correct'"):

        class TwoRewards(Shop):
            @reward(name="correct")
            def right(self, episode):
                return 1


def test_misplaced_tools_are_a_definition_error():
    with pytest.raises(DefinitionError, match=r"Plain\.price is a tool"):

        class Plain(Env):
            @tool
            def price(self) -> int:
                return 1

    with pytest.raises(DefinitionError, match="extra_tools holds"):

        class Undecorated(ToolEnv):
            extra_tools = (len,)


# Scores


def test_score_runs_every_component():
    assert asyncio.run(opened().score(episode("4"))) == (Reward("correct", 1.0, 2), Reward("turns", 0.0, 0))
    assert asyncio.run(opened().score(episode("5")))[0] == Reward("correct", 0.0, 2)


# Values


@pytest.mark.parametrize(
    "limits",
    [{"turns": 0}, {"tokens": -1}, {"tool_calls": 1.5}, {"turns": True}, {"seconds": 0}, {"seconds": float("inf")}],
    ids=str,
)
def test_budget_refuses_meaningless_limits(limits):
    ((name, value),) = limits.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        Budget(**limits)


def test_budget_can_be_replaced_in_part():
    changed = dataclasses.replace(Budget(turns=2, seconds=1.5), tokens=10, turns=None)
    assert changed == Budget(turns=None, tokens=10, seconds=1.5)
    with pytest.raises(ConfigError):
        dataclasses.replace(Budget(), turns=0)


def test_messages_of_takes_text_and_messages():
    message = Message("system", "x")
    assert messages_of("hi") == (Message("user", "hi"),)
    assert messages_of(message) == (message,)
    assert messages_of([message, message]) == (message, message)


@pytest.mark.parametrize("observation", [None, 3, ["text"], [Message("user", "x"), None]], ids=str)
def test_messages_of_refuses_other_values(observation):
    with pytest.raises(TypeError, match="an observation is"):
        messages_of(observation)


@pytest.mark.parametrize(
    ("calls", "complaint"),
    [
        ([{"name": "look", "arguments": {}}], "tool_calls=.*give a tuple of ar.ToolCall"),
        (ToolCall("c", "look"), "tool_calls=.*give a tuple of ar.ToolCall"),
        ((ToolCall("c", "look", '{"at": 1}'),), r"ToolCall\(arguments='{\"at\": 1}'\): give a dict"),
    ],
    ids=["dicts", "one", "text"],
)
def test_message_refuses_calls_of_another_form(calls, complaint):
    with pytest.raises(TypeError, match=complaint):
        Message("assistant", tool_calls=calls)


def test_maybe_await_takes_values_and_awaitables():
    async def value() -> int:
        return 3

    assert asyncio.run(maybe_await(value())) == asyncio.run(maybe_await(3)) == 3


def test_scripts_talk_with_the_environment():
    class Solved(Shop):
        def oracle(self):
            (seen,) = yield Message("assistant", tool_calls=(ToolCall("a", "wait"),))
            yield seen.content

    async def play(env):
        script = env.oracle()
        step = await env.step(next(script))
        return script.send(step.observation)

    env = Solved()
    env.reset({"question": "?", "answer": "42"}, np.random.default_rng(0))
    assert inspect.isgenerator(env.oracle())
    assert asyncio.run(play(env)) == "42"
