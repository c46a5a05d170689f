"""Stand-ins that the tests share. Append only."""

from __future__ import annotations

import asyncio
import enum
import functools
from collections.abc import Container, Iterable, Sequence
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from episodes import example_episode as example_episode  # not of `tests`: where verl is, another package has the name
from pydantic import BaseModel

from agent_rl.algorithms.samples import Sample
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import Message, Step, Task, ToolCall
from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, ToolEnv
from agent_rl.gym.registry import EnvSpec, register
from agent_rl.gym.reward import reward
from agent_rl.gym.tasks import TaskSource
from agent_rl.gym.tool import ToolSpec, tool
from agent_rl.policy import AnyPolicy, Scripted, TokenPolicy
from agent_rl.rendering.base import Bridge, Renderer
from agent_rl.rollout import Job, run_episode, run_jobs

if TYPE_CHECKING:
    from agent_rl.rendering.chatml import ChatMLRenderer


def sampled(replies: Iterable[Sequence[int]], versions: Iterable[int] = ()) -> list[Completion]:
    """Return replies as an engine samples them; `versions` are those of one token after the other, then 0."""
    version = chain(versions, repeat(0))
    completions = []
    for reply in replies:
        logprobs = tuple(-0.001 * (i + 1) for i in range(len(reply)))
        versions_of_reply = tuple(islice(version, len(reply)))
        completions.append(Completion(tuple(reply), logprobs, FinishReason.STOP, versions_of_reply))
    return completions


class UnprovenRenderer:
    """A renderer that can't bridge the turns in `unproven` (counted from 1); implements `Renderer`."""

    def __init__(self, renderer: Renderer, unproven: Container[int]) -> None:
        self.renderer, self.unproven = renderer, unproven
        self.turn = 0
        self.stop_ids = renderer.stop_ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self.renderer.prompt(messages, tools)

    def bridge(
        self, prefix: Sequence[int], reply: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> Bridge | None:
        self.turn += 1
        return None if self.turn in self.unproven else self.renderer.bridge(prefix, reply, messages, tools)

    def parse(self, reply: Sequence[int], prefix: Sequence[int] = (), tools: Sequence[ToolSpec] = ()) -> Message:
        return self.renderer.parse(reply, prefix, tools)

    def reply(self, message: Message) -> list[int]:
        return self.renderer.reply(message)


@functools.cache
def small_renderer() -> ChatMLRenderer:
    """Return a renderer over a tokenizer of bytes and small numbers, made in a fraction of a second."""
    from agent_rl.rendering.chatml import ChatMLRenderer
    from agent_rl.rendering.tokenizer import train_tokenizer

    return ChatMLRenderer(train_tokenizer(["compute 3*4+5 calculator expression"], 432))


CALL = Message("assistant", tool_calls=(ToolCall("call_0", "roll"),))
"""A player's call of the die."""


class Panic(BaseException):
    """As pyo3's `PanicException`: an error of a library that is no `Exception`."""


class Dice(ToolEnv):
    """Rolls dice; breaks, hangs or stops where its task says."""

    closed: ClassVar[list[str]] = []
    """The names of the tasks whose environments were closed; tests empty it."""

    def __init__(self, sides: int = 6) -> None:
        if sides < 1:
            raise ValueError("a die has sides")
        self.sides = sides

    async def reset(self, task, rng):
        self.task, self.rng = task, rng
        await self.at("reset")
        return "roll"

    @tool(inline=True)
    def roll(self) -> int:
        return int(self.rng.integers(self.sides)) + 1

    async def step(self, action):
        await self.at("step")
        step = await super().step(action)
        return Step(step.observation, self.task.get("pay", 0.0), step.terminated, bool(self.task.get("truncate")))

    async def at(self, where: str) -> None:
        if self.task.get("break") == where:
            raise KeyError(f"broken {where}")
        if self.task.get("cancel") == where:
            raise asyncio.CancelledError
        if self.task.get("panic") == where:
            raise Panic("rust")
        if self.task.get("cancel itself") == where:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        if self.task.get("hang") == where:
            await asyncio.Event().wait()

    @reward
    async def six(self, episode) -> float | None:
        await self.at("score")
        return None if self.task.get("unscored") else float(episode.final_text == "6")

    async def close(self) -> None:
        if not hasattr(self, "task"):  # never reset
            Dice.closed.append("unopened")
            return
        Dice.closed.append(str(self.task.get("name", "")))
        await self.at("close")


def dice_spec(cls: type[Env] = Dice, budget: Budget | None = None) -> EnvSpec:
    """Return an environment as if it were registered."""
    return EnvSpec("", "dice", 0, cls, TaskSource(), budget or Budget())


def play(*answers: str | Message) -> Scripted:
    """Return a policy that gives these answers in every episode."""

    return Scripted(lambda env, seed: (answer for answer in answers))


def token_policy(*replies: str | Message, max_tokens: int = 64, context_limit: int | None = None) -> TokenPolicy:
    """Return a policy that samples these replies, in one episode."""
    renderer = small_renderer()
    messages = [Message("assistant", r) if isinstance(r, str) else r for r in replies]
    engine = ScriptedEngine(sampled(renderer.reply(m) for m in messages), context_limit=context_limit)
    return TokenPolicy(engine, renderer, SamplingParams(max_tokens=max_tokens))


def run_dice(
    policy: AnyPolicy,
    task: Task | None = None,
    budget: Budget | None = None,
    cls: type[Env] = Dice,
    *,
    seed: int = 0,
    **job: object,
) -> Episode:
    """Run one episode of dice."""
    return asyncio.run(run_episode(Job(dice_spec(cls, budget), task or {}, seed, **job), policy))  # type: ignore[arg-type]


@register("silent-v0", tasks=None)
class Silent(Env):
    """An environment without scripts."""

    id = "silent-v0"

    def reset(self, task, rng):
        return "say something"

    def step(self, action):
        return Step(terminated=True)


def example_sample(length: int, sampled: list[int], reward: float = 1.0, seed: int = 0, episode: int = 0) -> Sample:
    """Return `length` tokens, those at the positions in `sampled` from the policy, the reward on the last of them."""
    rng = np.random.default_rng([seed, length])
    mask = np.isin(np.arange(length), sampled)
    rewards = np.zeros(length, np.float32)
    if sampled:
        rewards[max(sampled)] = reward
    return Sample(
        token_ids=rng.integers(0, 50, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, rng.normal(-3.9, 0.2, length), 0).astype(np.float32),
        rewards=rewards,
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.zeros(length, np.int32),
        moments=np.arange(length, dtype=np.int32),
        sources=np.where(mask, 1, 0).astype(np.int32),
        episode=episode,
    )


def plays(env: EnvSpec, split: str, policy: AnyPolicy, n: int) -> list[Episode]:
    """Play the first tasks of a split."""
    return asyncio.run(run_jobs([Job(env, env.tasks.get(split, i), i) for i in range(n)], policy))


def play_again(episode: Episode) -> Episode:
    """Give a stored episode's own answers to its environment once more."""
    from agent_rl.gym.registry import spec

    answers = [m for m in episode.messages if m.role == "assistant"]
    job = Job(spec(episode.env), episode.task, episode.seed, episode.group_id, env_args=episode.env_args, id=episode.id)
    return asyncio.run(run_episode(job, play(*answers)))


def assert_plays_again(episode: Episode) -> bool:
    """Check that an episode replays the same; return False if its last reply was cut off."""
    again = play_again(episode)
    assert again.messages[: len(episode.messages)] == episode.messages, episode.id
    whole = episode.stop_reason not in (StopReason.LENGTH, StopReason.TOKENS)
    if whole:
        assert (again.steps, again.rewards, again.outcome) == (episode.steps, episode.rewards, episode.outcome)
    return whole


class Color(enum.Enum):
    """One of few values, as a tool takes and gives it."""

    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """Fields with a default, as a tool takes and gives them."""

    x: int
    y: int = 0
