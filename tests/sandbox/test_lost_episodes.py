"""What an episode is worth that lost its sandbox, by the cause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_rl as ar
from agent_rl.core.ending import Ending
from agent_rl.core.episode import Episode, Outcome
from agent_rl.core.messages import JSON, Message, Task, ToolCall
from agent_rl.core.sandbox_loss import COUNTS_AS, Cause, SandboxLoss
from agent_rl.errors import SandboxError
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.policy.scripted import Scripted
from agent_rl.rollout import Job, run_episode, summarise
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.sandboxes.base import FileAccessError, PythonResult
from agent_rl.testing.fake_sandboxes import FakeSandbox, FakeSandboxes
from agent_rl.tools.python import python


class Breakable(FakeSandbox):
    """A sandbox that the code "end" ends, and that the host may lose."""

    given: SandboxLoss | None = None

    @property
    def loss(self) -> SandboxLoss | None:
        return self.given

    async def run_python(self, code: str, **_: object) -> PythonResult:  # type: ignore[override]
        if code in COUNTS_AS:
            self.given = SandboxLoss(Cause(code), "gone")
            if not self.given.is_failure:
                raise SandboxError("gone", self.given)
        return await super().run_python(code)

    async def read_file(self, path: str, **_: object) -> bytes:  # type: ignore[override]
        if self.given is not None:
            raise FileAccessError("the sandbox was lost")
        return b"right"


class Backend(FakeSandboxes):
    async def open(self, **_: object) -> FakeSandbox:  # type: ignore[override]
        self.opened.append(Breakable())
        return self.opened[-1]


class Work(SandboxedEnv):
    """Earns by steps, by a file and by what is said; what it reads breaks with the sandbox, in any of three places."""

    extra_tools = (python,)

    def __init__(self, breaks: str = "score", penalty: float = 0.0) -> None:
        super().__init__()
        self._backend, self.breaks, self.penalty = Backend(), breaks, penalty

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        await self.open_sandbox()
        return "go"

    async def step(self, action: Message) -> ar.Step:
        step = await super().step(action)
        if self.breaks == "step":
            await self.sandbox.read_file("state")
        return ar.Step(step.observation, 0.25, step.terminated)

    @ar.reward
    async def correct(self, episode: Episode) -> bool:
        if self.breaks == "score":
            await self.sandbox.read_file("answer")
        return True

    @ar.reward(weight=-1.0)
    def costs(self, episode: Episode) -> float:
        return self.penalty


ar.register("losses-work-v0", tasks=lambda split, index: {"index": index})(Work)


def played(runner: asyncio.Runner, code: str, **env_args: JSON) -> Episode:
    def script() -> Iterator[Message | str]:
        yield Message("assistant", tool_calls=(ToolCall("c", "python", {"code": code}),))
        yield "done"

    job = Job(ar.spec("losses-work-v0"), {"index": 0}, 0, env_args=env_args)
    return runner.run(run_episode(job, Scripted(lambda env, seed: script())))


@settings(max_examples=30, deadline=None)
@given(
    cause=st.sampled_from(list(Cause)),
    breaks=st.sampled_from(["step", "score", "nowhere"]),
    penalty=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_episode_counts_as_its_loss_does(runner, cause: Cause, breaks: str, penalty: float):
    episode = played(runner, str(cause), breaks=breaks, penalty=penalty)
    found = rollout_metrics([episode])
    assert episode.sandbox_loss == SandboxLoss(cause, "gone")
    assert found[f"rollout/sandbox_lost/{cause}"] == 1.0
    if COUNTS_AS[cause] == "failure":
        assert episode.ending is Ending.SANDBOX_ENDED and episode.success is False and episode.trainable
        assert episode.reward is not None and episode.reward <= 0 and episode.turns == 1
        if breaks == "nowhere":
            assert episode.reward == -penalty  # what it lost stays, or a crash would be cheaper than a wrong answer
        assert summarise([episode]).success.n == 1 and found["rollout/failed"] == 0
    else:
        assert episode.ending is Ending.SANDBOX_LOST and episode.outcome is Outcome.FAILED and episode.reward is None
        assert summarise([episode]).success.n == 0 and found["rollout/failed/sandbox_lost"] == 1


def test_episode_that_keeps_its_sandbox_earns_its_reward(runner):
    episode = played(runner, "1", penalty=0.5)
    assert episode.sandbox_loss is None and episode.reward == pytest.approx(1 - 0.5 + 2 * 0.25)
    assert not [name for name in rollout_metrics([episode]) if "sandbox_lost" in name]
