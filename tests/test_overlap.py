"""Slow environments and judges overlap between episodes, on a server and on the embedded engine."""

import asyncio
import copy
import threading
import time
from typing import Any, ClassVar

import pytest

from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.core.episode import Episode, Outcome, StopReason
from agent_rl.core.messages import Step
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.stateless import EngineOutput, StatelessEngine
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, ToolEnv
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.reward import reward
from agent_rl.gym.tasks import TaskSource
from agent_rl.policy import Policy, TokenPolicy
from agent_rl.rollout import Job, run_jobs
from tests.doubles import play, run_dice, small_renderer
from tests.engines import TINY

N = 16
SECONDS = 0.5
PATIENCE = 20.0
"""Seconds until a wait for another episode gives up, and the test fails."""


class Answered(Env):
    """Takes any answer."""

    def reset(self, task, rng):
        self.task = task
        return "say something"

    def step(self, action):
        return Step(terminated=True)


class Judged(Answered):
    """Its judge answers once all episodes have asked."""

    asked: ClassVar[asyncio.Barrier]

    @reward
    async def judged(self, episode) -> float:
        async with asyncio.timeout(PATIENCE):
            return float(await self.asked.wait() < N)


class Slow(Answered):
    """Its judge is slow."""

    @reward
    async def judged(self, episode) -> float:
        await asyncio.sleep(SECONDS)
        return 1.0


class Simulated(Answered):
    """Blocks in every method until all episodes are in it: each must have a thread of its own."""

    blocking = True
    met: ClassVar[dict[str, threading.Barrier]]

    def reset(self, task, rng):
        self.met["reset"].wait(PATIENCE)
        return super().reset(task, rng)

    def step(self, action):
        self.met["step"].wait(PATIENCE)
        return super().step(action)

    @reward
    def judged(self, episode) -> float:
        self.met["judged"].wait(PATIENCE)
        return 1.0

    def close(self) -> None:
        self.met["close"].wait(PATIENCE)


class Stuck(Answered):
    """The first of all hangs in its step until the others have ended."""

    blocking = True
    ended: ClassVar[threading.Semaphore]

    def step(self, action):
        waited = self.task["number"] != 0 or all(self.ended.acquire(timeout=PATIENCE) for _ in range(N - 1))
        return Step(reward=float(waited), terminated=True)

    def close(self) -> None:
        self.ended.release()


class Hanging(Answered):
    """Never answers."""

    blocking = True
    released: ClassVar[threading.Event]

    def step(self, action):
        self.released.wait(PATIENCE)
        return super().step(action)


async def answer(sequence: str, token_ids: list[int], settings: dict[str, Any]) -> EngineOutput:
    """Answer as a server does: after other tasks of the loop ran."""
    await asyncio.sleep(0)
    return EngineOutput([40], [-1.0])


@pytest.fixture(params=["server", "embedded"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """Replies with one token, whichever it is."""
    renderer = copy.copy(small_renderer())
    renderer.stop_ids = frozenset(range(432))
    if request.param == "server":
        return TokenPolicy(StatelessEngine(answer, 256), renderer)
    return TokenPolicy(Engine(make_model(ModelConfig(**TINY), 432, seed=0), slots=N, max_len=256), renderer)


def episodes_of(cls: type[Env], policy: Policy, budget: Budget | None = None, n: int = N) -> list[Episode]:
    spec = EnvSpec("", "slow", 0, cls, TaskSource(), budget or Budget())
    return asyncio.run(run_jobs([Job(spec, {"number": i}, i) for i in range(n)], policy, concurrency=n))


def test_judges_overlap(policy: Policy) -> None:
    Judged.asked = asyncio.Barrier(N)
    assert [e.value("judged") for e in episodes_of(Judged, policy)] == [1.0] * N


def test_slow_rewards_overlap(policy: Policy) -> None:
    started = time.monotonic()
    episodes = episodes_of(Slow, policy)
    assert [e.value("judged") for e in episodes] == [1.0] * N
    assert SECONDS <= time.monotonic() - started < N * SECONDS / 2


def test_blocking_methods_overlap(policy: Policy) -> None:
    Simulated.met = {where: threading.Barrier(N) for where in ("reset", "step", "judged", "close")}
    episodes = episodes_of(Simulated, policy)
    assert [e.error for e in episodes] == [None] * N and [e.value("judged") for e in episodes] == [1.0] * N
    assert all(barrier.n_waiting == 0 and not barrier.broken for barrier in Simulated.met.values())


def test_stuck_episode_leaves_others_running(policy: Policy) -> None:
    Stuck.ended = threading.Semaphore(0)
    episodes = episodes_of(Stuck, policy)
    assert [e.reward for e in episodes] == [1.0] * N
    assert episodes[0].seconds == max(e.seconds for e in episodes)


def test_hung_environment_runs_out_of_time() -> None:
    Hanging.released = threading.Event()
    renderer = copy.copy(small_renderer())
    renderer.stop_ids = frozenset(range(432))
    (episode,) = episodes_of(Hanging, TokenPolicy(StatelessEngine(answer, 256), renderer), Budget(seconds=0.2), n=1)
    Hanging.released.set()
    assert (episode.stop_reason, episode.outcome) == (StopReason.SECONDS, Outcome.TRUNCATED)


def test_thread_errors_fail_the_episode() -> None:
    class Broken(Answered):
        blocking = True

        def step(self, action):
            raise OSError("the simulator is gone")

    episode = run_dice(play("6"), cls=Broken)
    assert episode.error is not None and (episode.error.where, episode.error.type) == ("step", "OSError")


def test_methods_run_on_the_loop_by_default() -> None:
    class Plain(Answered):
        def step(self, action):
            return Step(reward=float(threading.current_thread() is threading.main_thread()), terminated=True)

    class Threaded(Plain):
        blocking = True

    assert [run_dice(play("6"), cls=cls).reward for cls in (Plain, Threaded)] == [1.0, 0.0]


def test_blocking_covers_answers_and_rewards() -> None:
    threads: dict[str, str] = {}

    class Checked(ToolEnv):
        blocking = True

        def reset(self, task, rng):
            return "say something"

        def on_answer(self, action):
            threads["answer"] = threading.current_thread().name
            return Step(terminated=True)

        @reward
        def one(self, episode) -> float:
            threads["one"] = threading.current_thread().name
            return 1.0

    assert run_dice(play("6"), cls=Checked).reward == 1.0
    assert threads == {"answer": "Checked.on_answer", "one": "Checked.one"}
