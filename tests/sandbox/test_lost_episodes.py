"""What an episode is worth that lost its sandbox, by the cause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

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
from agent_rl.gym import sandboxed
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.policy.base import Reply
from agent_rl.policy.scripted import Scripted, ScriptedConversation
from agent_rl.rollout import Job, run_episode, summarise
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.sandboxes.call_clock import BEAT, CallClock, counted, counting
from agent_rl.sandboxes.calls import Command, ExecResult, FileAccessError, PythonResult
from agent_rl.sandboxes.process import ProcessError
from agent_rl.testing.fake_sandboxes import FakeSandbox, FakeSandboxes
from agent_rl.tools.python import python


class Breakable(FakeSandbox):
    """A sandbox that the code "end" ends, and that the host may lose."""

    given: SandboxLoss | None = None
    seconds: float = 0.0
    """That its other commands take."""
    lacks_memory: bool = False
    """Whether the kernel killed something in it, as the host has too little."""
    over: float | None = None
    """When its lifetime is over; the host notices when it is called."""

    async def run_command(self, command: Command) -> ExecResult:
        if self.lacks_memory:
            raise SandboxError("no memory", SandboxLoss(Cause.HOST_MEMORY, "no memory"))
        with counted():
            await asyncio.sleep(float(command.argv[-1]) if command.argv[0] == "sleep" else self.seconds)
        if self.over is not None and time.monotonic() >= self.over:
            self.given = SandboxLoss(Cause.LIFETIME, "over")
            raise SandboxError("over", self.given)
        return ExecResult(0, "", "")

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


@dataclass
class Backend(FakeSandboxes):
    lifetime: float | None = None

    async def open(self, **_: object) -> FakeSandbox:  # type: ignore[override]
        opened = Breakable()
        opened.over = None if self.lifetime is None else time.monotonic() + self.lifetime
        self.opened.append(opened)
        return opened


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


class Sleep(SandboxedEnv):
    """A command of some seconds takes some share of a lifetime; the rest is the policy's own time."""

    lifetime = 0.2

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._backend, self.seconds = Backend(lifetime=self.lifetime), seconds

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        await self.open_sandbox()
        return "go"

    async def on_answer(self, action: Message) -> ar.Step:
        await self.sandbox.exec(["sleep", str(self.seconds)])
        return ar.Step("go on")

    @ar.reward
    async def correct(self, episode: Episode) -> bool:
        return True


ar.register("losses-sleep-v0", tasks=lambda split, index: {"index": index})(Sleep)


class SlowConversation(ScriptedConversation):
    """With an engine that takes its time."""

    async def reply(self, max_tokens: int | None = None) -> Reply:
        await asyncio.sleep(0.1)
        return await super().reply(max_tokens)


class Slow(Scripted):
    def start_in(self, env: Env, seed: int) -> ScriptedConversation:
        return SlowConversation(self, env, seed)


@pytest.mark.parametrize(("seconds", "cause"), [(0.15, Cause.LIFETIME_SPENT), (0.01, Cause.LIFETIME)])
def test_lifetime_counts_as_the_act_of_who_used_it_up(runner, seconds: float, cause: Cause):
    job = Job(ar.spec("losses-sleep-v0"), {"index": 0}, 0, env_args={"seconds": seconds})
    episode = runner.run(run_episode(job, Slow(lambda env, seed: (answer for answer in ["on"] * 9))))
    assert episode.sandbox_loss is not None and episode.sandbox_loss.cause is cause
    assert episode.reward == (0.0 if cause is Cause.LIFETIME_SPENT else None)


def test_call_clock_leaves_out_what_the_loop_stood_still(runner):
    async def main() -> float:
        calls = CallClock()

        async def one(seconds: float) -> None:
            with counted():
                await asyncio.sleep(seconds)

        with counting(calls):
            await asyncio.gather(one(0.2), one(0.1))  # counted once
            assert 0.15 < calls.seconds < 0.5
            standing = asyncio.ensure_future(one(BEAT / 2))
            await asyncio.sleep(0)
            time.sleep(2 * BEAT)
            await standing
        await one(0.5)
        return calls.seconds

    assert runner.run(main()) < BEAT + 0.5


class Read(SandboxedEnv):
    """Its reward fails, in one of several ways, on a host in some state."""

    def __init__(self, fails: str, host: str) -> None:
        super().__init__()
        self._backend, self.fails, self.host = Backend(), fails, host

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        await self.open_sandbox()
        return "go"

    @ar.reward
    async def correct(self, episode: Episode) -> bool:
        if self.host == "without memory":
            self._backend.opened[0].lacks_memory = True  # type: ignore[attr-defined]
        match self.fails:
            case "file":
                raise FileAccessError("no such file")
            case "process":
                raise ProcessError("no process")
            case "parser":
                raise ValueError("no number")
            case "late call":
                with counted():
                    await asyncio.sleep(60)
            case "late judge":
                await asyncio.sleep(60)
        return True


ar.register("losses-read-v0", tasks=lambda split, index: {"index": index})(Read)


@pytest.mark.parametrize("host", ["well", "without memory", "slow"])
@pytest.mark.parametrize("fails", ["file", "process", "parser", "late call", "late judge", "nothing"])
def test_reward_that_fails_counts_by_whose_act_it_was(runner, monkeypatch, fails: str, host: str):
    monkeypatch.setattr(sandboxed, "HOST_SECONDS", 0.1)
    monkeypatch.setattr(Breakable, "seconds", 0.2 if host == "slow" else 0.0)
    budget = Budget(score_seconds=0.2)
    job = Job(ar.spec("losses-read-v0"), {"index": 0}, 0, env_args={"fails": fails, "host": host}, budget=budget)
    episode = runner.run(run_episode(job, Scripted(lambda env, seed: (answer for answer in ["done"]))))
    is_act = (host == "well" and fails == "late call") or (host != "without memory" and fails in ("file", "process"))
    assert episode.reward == (1.0 if fails == "nothing" else 0.0 if is_act else None)


class Opened(SandboxedEnv):
    """Would earn 1 and lose 0.25, whatever a step of a subclass's own raises."""

    def __init__(self, fails: str, host: str = "well") -> None:
        super().__init__()
        self._backend, self.fails, self.host = Backend(), fails, host

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        await self.open_sandbox()
        self._backend.opened[0].lacks_memory = self.host == "without memory"  # type: ignore[attr-defined]
        return "go"

    @ar.reward
    def correct(self, episode: Episode) -> bool:
        return True

    @ar.reward(weight=-0.25)
    def costs(self, episode: Episode) -> bool:
        return True

    def fail(self) -> ar.Step:
        errors = {"file": FileAccessError("too large"), "process": ProcessError("gone"), "parser": ValueError("no")}
        raise errors[self.fails]


class Mixed:
    def step(self, action: Message) -> ar.Step:
        return self.fail()  # type: ignore[attr-defined, no-any-return]


class OwnStep(Opened):
    """Takes its steps itself."""

    async def step(self, action: Message) -> ar.Step:
        await super().step(action)
        return self.fail()


class OwnAnswer(Opened):
    """Answers itself."""

    def on_answer(self, action: Message) -> ar.Step:
        return self.fail()


class MixedStep(Mixed, Opened):
    """Has a step from elsewhere, in a thread."""

    blocking = True


for own in (OwnStep, OwnAnswer, MixedStep):
    ar.register(f"losses-{own.__name__.lower()}-v0", tasks=lambda split, index: {"index": index})(own)


@pytest.mark.parametrize("name", ["ownstep", "ownanswer", "mixedstep"])
@pytest.mark.parametrize(
    ("args", "reward"),
    [
        ({"fails": "file"}, -0.25),
        ({"fails": "process"}, -0.25),
        ({"fails": "parser"}, None),
        ({"fails": "file", "host": "without memory"}, None),
    ],
)
def test_step_that_fails_counts_by_whose_act_it_was(runner, name: str, args: dict[str, JSON], reward: float | None):
    job = Job(ar.spec(f"losses-{name}-v0"), {"index": 0}, 0, env_args=args)
    episode = runner.run(run_episode(job, Scripted(lambda env, seed: (answer for answer in ["done"]))))
    assert episode.reward == reward and episode.turns == 1
    assert episode.ending is (Ending.ENV_CRASH if args["fails"] == "parser" else episode.ending)


MEDDLE = """
import os, threading
def meddle():
    seen = {1, os.getpid()}
    while True:
        for pid in {int(pid) for pid in os.listdir("/proc") if pid.isdigit()} - seen:
            seen.add(pid)
            try: os.kill(pid, %s)
            except OSError: continue
            threading.Timer(0.7, lambda: os.kill(pid, 18)).start()
threading.Thread(target=meddle, daemon=True).start()
"""


class Files(SandboxedEnv):
    """Its reward reads what the policy may have left."""

    extra_tools = (python,)

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        await self.open_sandbox()
        return "go"

    @ar.reward
    async def correct(self, episode: Episode) -> bool:
        for _ in range(4):
            await self.sandbox.write_file("test.py", b"")
        return (await self.sandbox.read_file("answer")) == b"42"


ar.register("losses-files-v0", tasks=lambda split, index: {"index": index})(Files)


@pytest.mark.sandbox
@pytest.mark.parametrize("code", ["1", MEDDLE % 9, MEDDLE % 19], ids=["wrote nothing", "kills", "stops"])
def test_code_that_meddles_with_its_grading_earns_nothing(runner, code: str):
    def script() -> Iterator[Message | str]:
        yield Message("assistant", tool_calls=(ToolCall("c", "python", {"code": code}),))
        yield "done"

    job = Job(ar.spec("losses-files-v0"), {"index": 0}, 0, budget=Budget(score_seconds=2.0))
    episode = runner.run(run_episode(job, Scripted(lambda env, seed: script())))
    assert episode.reward == 0.0, episode.error
