"""The clock of an episode: what it does now, since when, and how long its environment and its policy may take."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from agent_rl.concurrency import call, is_awaitable, maybe_await
from agent_rl.core.messages import Message, Step, own_calls
from agent_rl.core.meter import Meter
from agent_rl.gym.budget import Budget, overdue
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.policy.base import Conversation, Reply

CALLER = "caller"
"""The stage of an episode whose policy is a caller of ours: nothing of ours works until it says more."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class OutOfTimeError(Exception):
    """The environment's time ran out in a step."""


class EpisodeClock:
    """What one episode under way does, and how much of its time that takes."""

    def __init__(self, spec: EnvSpec, budget: Budget) -> None:
        self.spec, self.budget = spec, budget
        self.meter = Meter()
        self.stage = "make"
        """What a failure is reported to have broken."""
        self.started = self.since = time.perf_counter()
        """When the episode, and when its present call, began."""

    @property
    def seconds(self) -> float:
        """How long the episode has taken."""
        return time.perf_counter() - self.started

    @property
    def is_over(self) -> bool:
        """Whether the environment's time is used up: where nothing is ever awaited, no timeout can strike."""
        return self.budget.seconds is not None and self.meter.spent >= self.budget.seconds

    def enter(self, stage: str) -> None:
        """Begin something else."""
        self.stage, self.since = stage, time.perf_counter()

    async def call(self, stage: str, method: Callable[[*Ts], T | Awaitable[T]], *args: *Ts) -> T:
        """Call a method of the environment, sync or async, within what is left of its time.

        Raises:
            OutOfTimeError: if that runs out, in a step.
            TimeoutError: if it runs out before the policy's first turn.
        """
        self.enter(stage)
        if (seconds := self.budget.seconds) is not None:
            return await self._call_within(seconds, stage, method, *args)
        begun = self._begin(stage, method, *args)
        return begun if type(begun) is Step or not is_awaitable(begun) else await begun

    def step(self, env: Env, reply: Message) -> Awaitable[Step]:
        """Give the environment a reply; what it changes of the calls is a copy of theirs."""
        return self.call("step", env.step, own_calls(reply))

    async def _call_within(
        self, seconds: float, stage: str, method: Callable[[*Ts], T | Awaitable[T]], *args: *Ts
    ) -> T:
        """Call a method that has, with the ones before, so much time."""
        started, spent, is_opening = self.since, self.meter.spent, stage in ("reset", "restore")
        try:
            async with asyncio.timeout(seconds - self.meter.spent) as clock:
                self.meter.clock = clock
                value = await maybe_await(self._begin(stage, method, *args))
            if is_opening and time.perf_counter() - started + self.meter.spent - spent >= seconds:
                raise overdue(stage, seconds)  # it awaited nothing: no timeout could strike
            return value
        except TimeoutError:
            if not clock.expired():  # the environment's own
                raise
            late = overdue(stage, seconds)
            raise (late if is_opening else OutOfTimeError(*late.args)) from None
        finally:
            self.meter.spent += time.perf_counter() - started
            self.meter.clock = None

    def _begin(self, stage: str, method: Callable[[*Ts], T | Awaitable[T]], *args: *Ts) -> T | Awaitable[T]:
        """Begin to call a method; in a worker thread if it may hold up the event loop."""
        if not self.spec.cls.blocking:
            return method(*args)
        return call(functools.partial(method, *args), thread=f"{self.spec.id} {stage}")

    def reply(self, conversation: Conversation, most: int | None) -> Awaitable[Reply]:
        """Ask the policy; its engine's queue is not the environment's time."""
        seconds, self.since = self.budget.reply_seconds, time.perf_counter()
        return conversation.reply(most) if seconds is None else self._reply_within(seconds, conversation, most)

    async def _reply_within(self, seconds: float, conversation: Conversation, most: int | None) -> Reply:
        """Ask the policy for a reply that may take so long."""
        try:
            async with asyncio.timeout(seconds) as clock:
                return await conversation.reply(most)
        except TimeoutError:
            if not clock.expired():
                raise
            raise TimeoutError(f"a reply took more than budget.reply_seconds={seconds:g}") from None
