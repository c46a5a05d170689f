"""Environments of ours as Gymnasium's: its checker, vector environments, faults that stay in their episode."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import NameNotFound, ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from tree import run_python

import agent_rl as ar
from agent_rl.core.messages import ToolCall
from agent_rl.errors import ToolServerError
from agent_rl.gym.registry import BUILTIN, spec
from agent_rl.gym.text_space import AnyText
from agent_rl.policy import Scripted
from agent_rl.rendering.hermes import CLOSE, OPEN, write_call
from agent_rl.rollout import Job, run_episode
from agent_rl.rollout.as_gymnasium import TextEnv
from agent_rl.rollout.episode import runs_under_way

STAGES = ("make", "reset", "step", "score", "close")


@ar.register(
    "gymnasium-test/faulty-v0", tasks={"train": [{"n": n} for n in range(99)], "eval": []}, budget=ar.Budget(turns=3)
)
class Faulty(ar.Env):
    """Three steps that earn 0.25 each; `stage` raises."""

    def __init__(self, stage: str = "") -> None:
        self.stage = stage
        self.fail("make")

    def fail(self, stage: str) -> None:
        if stage == self.stage:
            raise RuntimeError(f"no {stage} today")

    async def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        await asyncio.sleep(0)
        self.fail("reset")
        self.n, self.noise = task["n"], int(rng.integers(1000))
        return f"task {self.n}, noise {self.noise}"

    def step(self, action: ar.Message) -> ar.Step:
        self.fail("step")
        done = action.content == "end"
        return ar.Step((ar.Message("user", f"heard {action.content}"),), 0.25, terminated=done)

    @ar.reward(weight=2.0)
    def ended(self, episode: ar.Episode) -> bool:
        self.fail("score")
        return episode.final_text == "end"

    def close(self) -> None:
        self.fail("close")


@ar.register("gymnasium-test/lost-v0", tasks={"train": [{}], "eval": []})
class Lost(ar.ToolEnv):
    """A tool that needs a server, which `gone` says is gone."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = gone

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        return "task"

    @ar.tool
    def look(self) -> str:
        if self.gone:
            raise ToolServerError("it is gone")
        return "seen"

    @ar.reward(weight=2.25)
    def ended(self, episode: ar.Episode) -> bool:
        return episode.final_text == "end"


LOOK = OPEN + write_call(ToolCall("", "look", {})) + CLOSE


def made(name: str = "gymnasium-test.faulty-v0", **kwargs: object) -> TextEnv:
    env = gymnasium.make(f"agent_rl/{name}", **kwargs).unwrapped  # type: ignore[arg-type]
    assert isinstance(env, TextEnv)
    return env


NEED_A_CORPUS = ("research-wordnet-v0", "wordnet-v0")
IN_PROCESS = [
    name for name in sorted(BUILTIN) if not issubclass(spec(name).cls, ar.SandboxedEnv) and name not in NEED_A_CORPUS
]


@pytest.mark.parametrize("name", [*IN_PROCESS, "gymnasium-test.faulty-v0"])
def test_checker_of_gymnasium_finds_nothing(name: str) -> None:
    env = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
    env.close()


@pytest.mark.parametrize("first", ["agent_rl", "gymnasium"])
def test_ids_reach_gymnasium_in_either_order_of_imports(first: str) -> None:
    second = {"agent_rl": "gymnasium", "gymnasium": "agent_rl"}[first]
    code = f"""
import {first}, sys
print("gymnasium" in sys.modules)
import {second}
print(*gymnasium.registry, gymnasium.make("agent_rl/calculator-v0"))
agent_rl.register("mine-v0")(agent_rl.ToolEnv)
print(gymnasium.make("agent_rl/mine-v0"))
"""
    ran = run_python("-c", code)
    assert ran.returncode == 0, ran.stderr
    imported, ids, mine = ran.stdout.splitlines()
    assert imported == str(first == "gymnasium"), "agent_rl must not import gymnasium"
    assert all(f"agent_rl/{name} " in ids for name in BUILTIN) and "agent_rl/mine-v0" in mine


def test_wrong_name_is_suggested() -> None:
    with pytest.raises(NameNotFound, match="Did you mean: `calculator`"):
        gymnasium.make("agent_rl/calculater-v0")


def test_opening_shows_the_replies_of_its_examples() -> None:
    class Shown(Faulty):
        async def reset(self, task: ar.Task, rng: np.random.Generator) -> list[ar.Message]:  # type: ignore[override]
            shown = ar.Message("assistant", "I look.", tool_calls=(ToolCall("a", "look"),))
            found = ar.Message("tool", "5", tool_call_id="a")
            asked = ar.Message("user", await super().reset(task, rng))
            return [ar.Message("user", "Which?"), shown, found, ar.Message("assistant", "It is 5."), asked]

    ar.register("gymnasium-test/shown-v0", tasks={"train": [{"n": 1}]})(Shown)
    opening, _ = made("gymnasium-test.shown-v0").reset(seed=1)
    call = f'I look.{OPEN}{{"name":"look","arguments":{{}}}}{CLOSE}'
    example = f"Which?\n{call}\n<tool_response>\n5\n</tool_response>\nIt is 5.\ntask 1, noise "
    assert opening.startswith(example)
    trl = ar.as_trl("gymnasium-test/shown-v0")
    assert str(trl().reset(**trl.rows(1)[0])).startswith(example)


def test_opening_holds_the_schemas_and_calls_are_answered() -> None:
    env = made("calculator-v0", render_mode="ansi")
    opening, info = env.reset(seed=1)
    task = json.loads(str(info["task"]))
    assert '"name": "calculator"' in opening and opening.endswith(f"\ncompute {task['expression']}")
    call = ar.ToolCall("call_0", "calculator", {"operator": "+", "left": 1, "right": 2})
    said = f"<tool_call>{write_call(call)}</tool_call>"
    assert env.step(said) == ("<tool_response>\n3\n</tool_response>", 0.0, False, False, {})
    assert "error: malformed" in env.step("<tool_call>{</tool_call>")[0]
    observation, reward, terminated, truncated, info = env.step(str(task["answer"]))
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info == {
        **{"outcome": "terminated", "stop_reason": "done", "scored": True, "success": True},
        "rewards": {"correct": 1.0, "clean": 0.0},
    }
    assert f"assistant: {said}\ntool: 3\n" in str(env.render())
    env.close()


def test_steps_earn_what_the_episode_earns() -> None:
    env = made()
    env.reset(seed=0)
    rewards = [env.step(action)[1] for action in ("a", "b", "end")]
    assert rewards == [0.25, 0.25, 2.25]
    assert env.episode is not None and env.episode.reward == sum(rewards)
    with pytest.raises(ResetNeeded):
        env.step("more")
    env.close()


def test_budget_truncates() -> None:
    env = made(budget=ar.Budget(turns=1))
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step("a")
    assert (terminated, truncated, info["stop_reason"], info["scored"]) == (False, True, "turns", True)
    env.close()


def test_seed_and_options_choose_the_episode() -> None:
    env = made()
    openings = [env.reset(seed=5)[0], env.reset()[0]]
    assert openings == [env.reset(seed=5)[0], env.reset()[0]] and openings[0] != openings[1]
    opening, info = env.reset(options={"task": {"n": 7}, "seed": 11})
    job = Job(spec("gymnasium-test/faulty-v0"), {"n": 7}, 11)
    stored = asyncio.run(run_episode(job, Scripted(lambda env, seed: (word for word in ("a", "end")))))
    assert (opening, info["seed"]) == (stored.messages[0].content, 11) and opening.startswith("task 7,")
    assert env.reset(options={"index": 3})[0].startswith("task 3,")
    with pytest.raises(ar.ConfigError, match="not 'tusk'"):
        env.reset(options={"tusk": {}})
    with pytest.raises(ar.ConfigError, match="task=3 is no task"):
        env.reset(options={"task": 3})
    env.close()


def test_reset_and_close_end_an_open_episode() -> None:
    closed: list[int] = []

    class Counted(Faulty):
        def close(self) -> None:
            closed.append(1)

    ar.register("gymnasium-test/counted-v0", tasks=[{"n": 1}, {"n": 2}])(Counted)
    env = made("gymnasium-test.counted-v0")
    env.reset()
    env.reset()
    assert len(closed) == 1
    env.close()
    env.close()
    assert len(closed) == 2


@pytest.mark.parametrize("make", [made, lambda name: ar.as_trl(name.replace(".", "/"))()])
def test_abandoned_environment_is_closed_and_forgotten(make: Callable[[str], Any]) -> None:
    closed: list[int] = []

    class Forgotten(Faulty):
        def close(self) -> None:
            closed.append(1)

    ar.register("gymnasium-test/forgotten-v0", tasks=[{"n": 1}])(Forgotten)
    before = len(runs_under_way())
    env = make("gymnasium-test.forgotten-v0")
    env.reset()
    assert (len(closed), len(runs_under_way())) == (0, before + 1)
    del env
    gc.collect()
    assert (len(closed), len(runs_under_way())) == (1, before)


def test_open_episode_is_closed_at_exit() -> None:
    code = """
import agent_rl as ar, gymnasium
@ar.register("left-open-v0", tasks=[{"n": 1}])
class LeftOpen(ar.ToolEnv):
    def reset(self, task, rng): return "hello"
    async def close(self): print("closed")
env = gymnasium.make("agent_rl/left-open-v0")
env.reset()
"""
    ran = run_python("-c", code)
    assert (ran.stdout.strip(), ran.stderr) == ("closed", "")


def test_text_env_works_beside_a_running_loop() -> None:
    async def play() -> float:
        env = made()
        env.reset(seed=0)
        reward = env.step("end")[1]
        env.close()
        return reward

    assert asyncio.run(play()) == 2.25


def test_long_observation_loses_its_middle() -> None:
    env = made(max_length=80)
    env.reset(seed=0)
    observation = env.step("x" * 40 + "y" * 80)[0]
    assert len(observation) <= 80 and observation.startswith("heard xx") and observation.endswith("yy")
    assert "left out" in observation and observation in env.observation_space
    env.close()


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_failed_stage_truncates_without_a_score(stage: str) -> None:
    env = made(stage=stage)
    opening, info = env.reset(seed=0)
    early = stage in ("make", "reset")
    assert ("error: " in opening) == early and (info.get("outcome") == "failed") == early
    _, reward, terminated, truncated, info = env.step("end")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["outcome"], info["scored"]) == ("failed", False)
    assert info["error"] == f"{stage}: RuntimeError: no {stage} today"
    env.close()


def faulty(stage: str) -> gymnasium.Env[str, str]:
    return gymnasium.make("agent_rl/gymnasium-test.faulty-v0", stage=stage)


def play_vector(envs: VectorEnv[object, object, object]) -> tuple[list[float], list[str]]:
    """Return the sum of each environment's rewards over an episode, and its outcome."""
    envs.reset(seed=0)
    total = np.zeros(envs.num_envs)
    for action in ("a", "end"):
        _, rewards, _, _, infos = envs.step([action] * envs.num_envs)
        total += rewards if action == "a" else np.where(infos["_outcome"], rewards, 0.0)
    envs.close()
    return total.tolist(), list(infos["outcome"])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:.*close.* failed.*:RuntimeWarning")
def test_sync_vector_scores_the_other_seven(stage: str) -> None:
    totals, outcomes = play_vector(SyncVectorEnv([partial(faulty, stage if index == 3 else "") for index in range(8)]))
    others = [index for index in range(8) if index != 3 or stage == "close"]
    assert [totals[index] for index in others] == [2.5] * len(others)
    assert [outcomes[index] for index in others] == ["terminated"] * len(others)


ASYNC = """
import sys
sys.path.append("tests")
from functools import partial
from gymnasium.vector import AsyncVectorEnv
from test_gymnasium import LOOK, faulty, lost

if __name__ == "__main__":
    stages = ("", "step", "reset", "score", "close", "make")
    envs = AsyncVectorEnv([*(partial(faulty, stage) for stage in stages), partial(lost, True), partial(lost, False)])
    openings, _ = envs.reset(seed=0)
    heard = envs.step([*["é日a"] * 6, LOOK, LOOK])[0]
    _, rewards, terminated, _, infos = envs.step(["end"] * 8)
    well = [0, 4, 7]
    print([o[:5] for o in openings[:3]], heard[0] == "heard é日a", rewards[well], infos["outcome"][well])
    print("seen" in heard[7], infos["outcome"][[3, 5]])
    envs.close()
"""


def lost(gone: bool) -> gymnasium.Env[str, str]:
    return gymnasium.make("agent_rl/gymnasium-test.lost-v0", gone=gone)


def test_async_vector_scores_the_others() -> None:
    """Whatever raises: reset, step, a tool, a reward, close or the constructor."""
    ran = run_python("-c", ASYNC)
    said = "['task ', 'task ', 'error'] True [2.25 2.25 2.25] ['terminated' 'terminated' 'terminated']"
    assert ran.stdout.splitlines() == [said, "True ['failed' 'failed']"], ran.stderr


def test_sync_vector_scores_those_whose_tool_works() -> None:
    envs = SyncVectorEnv([partial(lost, index == 3) for index in range(8)])
    envs.reset(seed=0)
    first = envs.step([LOOK] * 8)[4]
    _, rewards, _, _, infos = envs.step(["end"] * 8)
    envs.close()
    assert first["error"][3] == "step: ToolServerError: it is gone"
    assert [rewards[i] for i in range(8) if i != 3] == [2.25] * 7 and list(infos["outcome"][:3]) == ["terminated"] * 3


def test_shared_texts_are_read_when_asked_for() -> None:
    space = AnyText(10)
    memory = create_shared_memory(space, 2, multiprocessing)
    texts = read_from_shared_memory(space, memory, 2)
    for text in ("ab", "日é😀\x00", "", "\ud800"):
        write_to_shared_memory(space, 1, text, memory)
        assert list(texts) == ["", text] and copy.deepcopy(texts) == ("", text)


def test_text_space_holds_its_samples() -> None:
    space = AnyText(20)
    space.seed(0)
    assert all(space.sample() in space for _ in range(50))
    assert "é" * 20 in space and "x" * 21 not in space and 3 not in space
    assert space == AnyText(20) != AnyText(21)
