"""Environments with a sandbox continue from their turns: what Monte-Carlo values and forks need."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agent_rl.core.messages import Message, ToolCall
from agent_rl.envs.quiz import one_call
from agent_rl.errors import SandboxError
from agent_rl.gym.env import ToolEnv
from agent_rl.gym.registry import spec
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.rollout import Job, continuation, run_episode
from agent_rl.tools.python import python
from agent_rl.tools.shell import shell
from tests.doubles import token_policy


class Undeclared(SandboxedEnv):
    """Says nothing of its attributes."""


class Plain(SandboxedEnv):
    """Two tools, and one attribute that changes."""

    extra_tools = (python, shell)
    snapshot_attributes = ("count",)

    async def reset(self, task: Any, rng: np.random.Generator) -> str:
        self.count = 0
        await self.open_sandbox()
        return "begin"

    async def step(self, action: Message) -> Any:
        self.count += 1
        return await super().step(action)


def says(env: ToolEnv, run, tool: str, **arguments: Any) -> str:
    step = run(env.step(one_call(tool, **arguments)))
    return step.observation[0].content


@pytest.fixture
def opened(run):
    made: list[Plain] = []

    def open_one() -> Plain:
        env = Plain()
        made.append(env)
        run(env.reset({}, np.random.default_rng(0)))
        return env

    yield open_one
    for env in made:
        run(env.close())


def test_restored_env_has_files_variables_and_attributes(opened, run):
    env = opened()
    says(env, run, "python", code="x = 20")
    says(env, run, "shell", command="echo 22 > n")
    state = run(env.snapshot())
    says(env, run, "python", code="x = 0")
    for _ in range(2):
        other = opened()
        run(other.restore(state))
        assert other.count == 2
        assert says(other, run, "python", code="x + int(open('n').read())") == "42"
    assert says(env, run, "python", code="x") == "0"


def test_restore_refuses_a_state_that_calls_do_not_bring_back(opened, run):
    env = opened()
    says(env, run, "python", code="import os; os.urandom(8)")
    with pytest.raises(SandboxError, match="can't continue from here: call 1 of 1 gave another result"):
        run(opened().restore(run(env.snapshot())))


def test_snapshot_of_hostile_files_does_not_break_an_episode(opened, run):
    env = opened()
    says(env, run, "python", code="import os; os.close(os.open('secret', os.O_CREAT | os.O_WRONLY, 0))")
    state = run(env.snapshot())
    assert says(env, run, "python", code="'goes on'") == "'goes on'"
    with pytest.raises(SandboxError, match=r"can't continue from here: .*secret"):
        run(opened().restore(state))


def test_sandboxed_env_without_declared_attributes_has_no_snapshots(run):
    assert not Undeclared.has_snapshots() and Plain.has_snapshots()
    with pytest.raises(NotImplementedError, match="snapshot_attributes"):
        run(Undeclared().snapshot())
    with pytest.raises(TypeError, match="can't restore a dict"):
        run(Plain().restore({}))


@pytest.mark.parametrize(
    "id", [*(pytest.param(id, marks=pytest.mark.sandbox) for id in ("python-v0", "shell-v0")), "code-v0"]
)
def test_episode_continues_from_every_turn(id):
    """With the same replies it comes to the same end, whatever the turn that it continues from."""
    env = spec(id)
    task = env.tasks.get("train", 0)
    tool = "shell" if id == "shell-v0" else "python"
    text = {"shell": {"command": "echo 1 >> mine; cat mine"}, "python": {"code": "x = globals().get('x', 0) + 1; x"}}
    call = Message("assistant", tool_calls=(ToolCall("call_0", tool, text[tool]),))
    replies = [call, call, call, Message("assistant", "7")]

    async def play() -> None:
        whole = await run_episode(Job(env, task, 0, snapshots=True), token_policy(*replies, max_tokens=4096))
        assert whole.error is None and len(whole.snapshots) == 4
        for turn in range(4):
            job = continuation(env, whole, turn, seed=1)
            again = await run_episode(job, token_policy(*replies[turn:], max_tokens=4096))
            assert again.error is None
            assert (again.messages, again.reward) == (whole.messages, whole.reward)

    asyncio.run(play())
