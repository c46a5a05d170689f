"""Forced ends of verl's episodes: by their budget, or by the end of the run."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorUnavailableError, RayTaskError
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from agent_rl.backends.verl.driver import watchdog
from agent_rl.backends.verl.driver.watchdog import Watchdog, WatchedProcess, stop_episodes
from agent_rl.backends.verl.worker.agent_loop import LONGEST_S, EnvAgentLoop, episode_budget
from agent_rl.backends.verl.worker.rows import episode_of
from agent_rl.core.episode import Episode, Outcome, Reward, StopReason
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Message, Step, Task
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import register
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.reward import judge
from agent_rl.judge.rubric import Rubric
from agent_rl.rendering import load_renderer, train_tokenizer

TOKENIZER = train_tokenizer(["hello there"] * 9, 500)
ROLLOUT = {"max_model_len": 400, "multi_turn": {}, "agent": {"num_workers": 4}}
REFERENCE = {"rollout": ROLLOUT, "actor": {"strategy": "fsdp2"}}
CONFIG = OmegaConf.create(
    {"actor_rollout_ref": REFERENCE, "data": {"agent_rl": {"routes": None, "store_experts": False}}}
)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
closed: list[str] = []


@register("never-v0", tasks=lambda split, index: {"n": index}, splits=("train",), budget=Budget())
class Never(Env):
    """Never answers."""

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        return "hello"

    async def step(self, action: Message) -> Step:
        await asyncio.Event().wait()
        raise AssertionError

    async def score(self, episode: Episode, *more: object) -> tuple[Reward, ...]:
        return ()

    async def close(self) -> None:
        await asyncio.sleep(0.05)  # takes a while
        closed.append("never")


class Server:
    """verl's client: answers at once, or never."""

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.asked = asyncio.Event()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        self.asked.set()
        if not self.answers:
            await asyncio.Event().wait()
        ids = load_renderer(TOKENIZER).reply(Message("assistant", "hello"))
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"min_global_steps": 3})


@register("greeted-v0", tasks=lambda split, index: {"n": index}, splits=("train",))
@judge(rubric={"criteria": ["Says hello."]})
class Greeted(Env):
    """Takes any answer, which a model judges."""

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        return "hello"

    def step(self, action: Message) -> Step:
        return Step(terminated=True)


def start(server: Server, env: str = "never-v0", **arguments: Any) -> Any:
    loop = EnvAgentLoop(
        DictConfigWrap(CONFIG),
        server,
        TOKENIZER,
        None,
        None,
        DictConfigWrap(CONFIG.data),
        env=env,
        env_args={},
        imports=[],
        seed=0,
        max_tokens=64,
        **arguments,
    )
    row = {"task": json.dumps({"n": 0}), "split": "train", "index": 0, "again": 0, "evaluation": False}
    return loop.run(SAMPLING, **row, session_id=0, global_steps=1)


@pytest.fixture(autouse=True)
def _nothing_closed() -> None:
    closed.clear()


def finished(server: Server, **budget: float) -> Episode:
    """Run an episode; it is closed afterwards."""

    async def run() -> Any:
        (output,) = await start(server, budget=OmegaConf.create(budget))
        return output

    episode = episode_of(asyncio.run(asyncio.wait_for(run(), 60)).extra_fields)
    assert episode is not None and closed == ["never"]
    return episode


class Judge:
    """Finds all met, or never answers."""

    name = "double"

    def __init__(self, config: JudgeConfig, log: Path) -> None:
        self.config, self.log = config, log
        judges.append(self)

    async def judge(self, episode: Episode, rubric: Rubric) -> Judgement:
        if self.config.model == "hangs":
            await asyncio.Event().wait()
        return Judgement(rubric.label, self.name, (), 1.0, episode.id)

    def close(self) -> None:
        pass


judges: list[Judge] = []


@pytest.mark.parametrize(("model", "reward"), [("answers", 1.0), ("hangs", None)])
def test_worker_asks_the_judge_of_the_run(
    model: str, reward: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_rl.judge.run.build_judge", Judge)

    async def run() -> list[Any]:
        settings = OmegaConf.create({"model": model, "requests_per_minute": 60})
        budget = {"score_seconds": 20.0 if reward else 0.3}
        given = {"judge": settings, "folder": str(tmp_path), "budget": budget}
        return await asyncio.gather(*(start(Server(), "greeted-v0", **given) for _ in range(2)))

    judges.clear()
    for (output,) in asyncio.run(run()):
        episode = episode_of(output.extra_fields)
        assert episode is not None and episode.reward == reward
        assert episode.ending == ("ok" if reward else "judge_failed")
    (made,) = judges  # one a process, with its share of the limits and a file of its own
    assert made.config.requests_per_minute == 15
    assert made.log.parent == tmp_path and made.log.name.startswith("judge_calls-")


def test_budget_ends_hung_environments() -> None:
    episode = finished(Server(), seconds=0.2)
    assert (episode.stop_reason, episode.outcome) == (StopReason.SECONDS, Outcome.TRUNCATED)
    assert episode.trajectories and len(episode.trajectories[0])


def test_budget_leaves_hung_servers_unscored() -> None:
    episode = finished(Server(answers=False), reply_seconds=0.2)
    assert (episode.outcome, episode.reward) == (Outcome.FAILED, None)
    assert episode.error is not None and "budget.reply_seconds=0.2" in episode.error.message


def test_episode_budget_always_bounds_seconds() -> None:
    bounds = {"seconds": LONGEST_S, "reply_seconds": LONGEST_S}
    assert episode_budget(Budget(turns=3, seconds=None), {}) == Budget(turns=3, **bounds)
    assert episode_budget(Budget(seconds=9), {}).seconds == 9
    wanted = {"seconds": 7200, "turns": 2, "reply_seconds": 60}
    assert episode_budget(Budget(seconds=9), wanted) == Budget(turns=2, seconds=7200, reply_seconds=60)


def test_agent_loop_cancelled_closes_its_environment() -> None:
    async def run() -> None:
        server = Server()
        task = asyncio.create_task(start(server))
        await asyncio.wait_for(server.asked.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert closed == ["never"]


def test_stop_episodes_cancels_and_awaits_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()

        def worker() -> Any:
            async def group() -> None:  # as verl runs one: it settles with all of its episodes
                await asyncio.gather(*(start(Server()) for _ in range(2)), return_exceptions=True)

            tasks = {loop.create_task(group()) for _ in range(2)}
            for task in tasks:
                task.add_done_callback(tasks.discard)
            found = SimpleNamespace(background_tasks=tasks)

            async def call(question: Any) -> Any:
                return question(found)

            found.__ray_call__ = SimpleNamespace(remote=call)
            return found

        def get(answers: list[Any], timeout: float) -> list[Any]:
            return [asyncio.run_coroutine_threadsafe(answer, loop).result(timeout) for answer in answers]

        monkeypatch.setattr(ray, "get", get)
        manager = SimpleNamespace(agent_loop_workers=[worker(), worker()])
        await asyncio.sleep(0.3)
        await asyncio.to_thread(stop_episodes, manager)
        assert len(closed) == 8  # all closed at its return

    asyncio.run(run())


def dead(number: int) -> Future[str | None]:
    """The answer of a process: lost by Ray for number 1, pending for 0."""
    answer: Future[str | None] = Future()
    if number:
        answer.set_exception(ActorUnavailableError("Worker exit type: SYSTEM_ERROR", b"7" * 16))
    return answer


LOST = RayTaskError(
    "fit", "a traceback of Ray's", ActorUnavailableError("pid: 7 Worker exit type: SYSTEM_ERROR", b"7" * 16)
)


@pytest.mark.parametrize("error", [ActorUnavailableError("pid: 7", b"7" * 16), LOST], ids=["direct", "of a task"])
@pytest.mark.parametrize("number", [0, 1])
def test_watchdog_names_the_lost_process(number: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "DIAGNOSIS_S", 0.1)
    said: list[str] = []
    watched = [WatchedProcess("server 0", lambda: dead(0)), WatchedProcess("worker 0", lambda: dead(number))]
    with pytest.raises(type(error)), Watchdog(watched, said.append):
        raise error
    (fault,) = said
    assert fault.startswith("worker 0 is dead: exit type SYSTEM_ERROR" if number else "a process of verl's is dead: ")
    assert "process 7" in fault or number


def test_watchdog_leaves_other_errors_alone() -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), Watchdog([], said.append):
        raise ZeroDivisionError
    assert not said
