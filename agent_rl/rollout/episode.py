"""One episode: an environment and a policy talk until one of them, or the budget, ends it."""

from __future__ import annotations

import asyncio
import time
import traceback
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from agent_rl.aio import maybe_await
from agent_rl.env import Budget, Env, messages_of
from agent_rl.policy.base import Conversation, Opening, Policy
from agent_rl.registry import EnvSpec
from agent_rl.types import (
    JSON,
    Episode,
    Failure,
    FinishReason,
    Message,
    Outcome,
    Reward,
    StepRecord,
    StopReason,
    Task,
)
from agent_rl.version import __version__


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: an environment, a task, and the seed that makes this episode this one."""

    spec: EnvSpec
    task: Task
    seed: int
    group_id: str = ""
    budget: Budget | None = None
    """Instead of the environment's own."""
    env_args: Mapping[str, JSON] = field(default_factory=dict)


async def run_episode(job: Job, policy: Policy) -> Episode:
    """Run one episode to its end; whatever breaks becomes its outcome, and nobody else's.

    Only a cancellation from outside propagates, after the environment was closed.
    """
    run = _Run(job, policy)
    started = time.perf_counter()
    env = None
    try:
        env = run.make_env()
        stop = await run.within_budget(env)
        return await run.score(env, stop, time.perf_counter() - started)
    except Exception as error:
        return run.failed(error, time.perf_counter() - started)
    finally:
        run.close_conversation()
        if env is not None:
            await _close(env, job.spec.id)


class _Run:
    """The growing record of one episode; `where` is what was going on when something broke."""

    def __init__(self, job: Job, policy: Policy) -> None:
        self.job, self.policy = job, policy
        self.budget = job.budget or job.spec.budget
        self.messages: list[Message] = []
        self.steps: list[StepRecord] = []
        self.conversation: Conversation | None = None
        self.replies = self.calls = 0
        self.where = "make"

    def make_env(self) -> Env:
        return self.job.spec.make(**self.job.env_args)

    async def within_budget(self, env: Env) -> StopReason:
        try:
            async with asyncio.timeout(self.budget.seconds) as clock:
                return await self.talk(env)
        except TimeoutError:
            if not clock.expired():  # the environment's own
                raise
            return self.cut(StopReason.SECONDS) if len(self.steps) < self.replies else StopReason.SECONDS

    async def talk(self, env: Env) -> StopReason:
        self.where = "reset"
        rng = np.random.default_rng(self.job.seed)
        observation = messages_of(await maybe_await(env.reset(self.job.task, rng)))
        self.where = "policy"
        conversation = self.policy.start(Opening(env, env.tools, self.job.seed))
        self.conversation = conversation
        while True:
            self.where = "policy"
            self.messages += observation
            room, tight = self.room(conversation.observe(observation), conversation.context_limit)
            if room is not None and room < 1:
                return StopReason.TOKENS
            reply = await conversation.reply(room)
            self.messages.append(reply.message)
            self.replies += 1
            if reply.finish_reason is not FinishReason.STOP:
                return self.cut(StopReason.TOKENS if tight else StopReason.LENGTH)
            self.calls += len(reply.message.tool_calls)
            if self.budget.tool_calls is not None and self.calls > self.budget.tool_calls:
                return self.cut(StopReason.TOOL_CALLS)
            self.where = "step"
            step = await maybe_await(env.step(reply.message))
            observation = step.observation
            self.steps.append(StepRecord(len(observation), float(step.reward), step.terminated, step.truncated))
            ended = self.ended(step.terminated, step.truncated)
            if ended is not None:
                self.messages += observation
                return ended

    def room(self, length: int, limit: int | None) -> tuple[int | None, bool]:
        """How many tokens are left for a reply, and whether the budget rather than the policy decides its length."""
        limits = [n for n in (self.budget.tokens, limit) if n is not None]
        return (min(limits) - length, min(limits) == self.budget.tokens) if limits else (None, False)

    def cut(self, reason: StopReason) -> StopReason:
        """Record a reply that the environment never got to answer."""
        self.steps.append(StepRecord(0, 0.0, False, True))
        return reason

    def ended(self, terminated: bool, truncated: bool) -> StopReason | None:
        if terminated:
            return StopReason.DONE
        if truncated:
            return StopReason.ENV_TRUNCATED
        if self.budget.turns is not None and self.replies >= self.budget.turns:
            return StopReason.TURNS
        return None

    async def score(self, env: Env, stop: StopReason, seconds: float) -> Episode:
        self.where = "score"
        outcome = Outcome.TERMINATED if stop is StopReason.DONE else Outcome.TRUNCATED
        episode = self.episode(stop, outcome, seconds)
        rewards = await env.score(episode)
        steps = (Reward("step", s.reward, source="step", turn=i) for i, s in enumerate(self.steps) if s.reward)
        return replace(episode, rewards=(*rewards, *steps))

    def failed(self, error: Exception, seconds: float) -> Episode:
        trace = "".join(traceback.format_exception(error))
        failure = Failure(self.where, type(error).__name__, str(error), trace)
        return replace(self.episode(StopReason.ERROR, Outcome.FAILED, seconds), error=failure)

    def episode(self, stop: StopReason, outcome: Outcome, seconds: float) -> Episode:
        job = self.job
        return Episode(
            id=uuid.uuid4().hex,
            env=job.spec.id,
            task=job.task,
            seed=job.seed,
            group_id=job.group_id,
            messages=tuple(self.messages),
            steps=tuple(self.steps),
            trajectories=self.conversation.trajectories if self.conversation else (),
            rewards=(),
            stop_reason=stop,
            outcome=outcome,
            versions={"agent_rl": __version__},
            env_args=job.env_args,
            seconds=seconds,
        )

    def close_conversation(self) -> None:
        if self.conversation is not None:
            self.conversation.close()


async def _close(env: Env, id: str) -> None:
    try:
        await maybe_await(env.close())
    except Exception as error:  # the episode is whole; a leak deserves a word, not the loss of the episode
        warnings.warn(f"{id}: close() failed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
