"""Scoring: the `@reward` methods of an environment, run on the finished episode within their time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agent_rl.concurrency import call, is_awaitable, maybe_await, run_together
from agent_rl.core.episode import Episode, Reward
from agent_rl.core.judgement import Judgement
from agent_rl.core.meter import Meter, meter
from agent_rl.gym.budget import overdue
from agent_rl.gym.reward import RewardComponent, as_reward, method_of
from agent_rl.worker_threads import WorkerCall


@dataclass(slots=True)
class Scoring:
    """An episode whose rewards come in, in any order."""

    env: object
    components: Sequence[RewardComponent]
    """Of its class, in the order of the rewards."""
    episode: Episode
    judgements: list[Judgement] | None
    """Filled with those that came, in the components' order."""
    rewards: dict[str, Reward] = field(default_factory=dict)
    judged: dict[str, Judgement] = field(default_factory=dict)

    async def run(self, seconds: float | None, *, blocking: bool) -> tuple[Reward, ...]:
        """Run the inline ones, then sync ones in a thread beside async ones; in a thread each, if they are `blocking`.

        Raises:
            TimeoutError: if they take more than `seconds` together.
        """
        left = []
        for c in self.components:
            if c.inline:
                self.keep(c, method_of(self.env, c)(self.episode))
            else:
                left.append(c)
        sync = [] if blocking else [c for c in left if not c.is_async]
        waiting: list[Callable[[], Awaitable[None]]]
        waiting = [functools.partial(self.score_one, c) for c in left if c not in sync]
        if sync and (slow := await self.begin(sync)) is not None:
            waiting.insert(0, slow)
        if waiting:
            await self.wait(waiting, seconds)
        return tuple(self.rewards[c.name] for c in self.components)

    async def begin(self, sync: Sequence[RewardComponent]) -> Callable[[], Awaitable[None]] | None:
        """Run sync methods one after the other in a thread, as one may never return; return the wait for slow ones."""
        methods = [self.method(c) for c in sync]
        running = WorkerCall(lambda: [method() for method in methods], self.label(sync[0]), quick=True)
        if await running.returns_quickly() and not any(map(is_awaitable, running.finished())):
            await self.keep_all(sync, running)
            return None
        return functools.partial(self.keep_all, sync, running)

    async def wait(self, waiting: Sequence[Callable[[], Awaitable[None]]], seconds: float | None) -> None:
        """Run what takes its time."""
        metered = meter.get() or Meter()
        try:
            async with asyncio.timeout(seconds) as clock:
                metered.clock = clock
                await run_together(waiting)
        except TimeoutError:
            if not clock.expired():
                raise
            late = ", ".join(c.name for c in self.components if c.name not in self.rewards)
            raise overdue(f"score (of {late})", seconds) from None
        finally:
            metered.clock = None

    async def score_one(self, component: RewardComponent) -> None:
        """Run a method, a sync one in a thread of its own."""
        thread = None if component.is_async else self.label(component)
        self.keep(component, await call(self.method(component), thread=thread))

    async def keep_all(self, components: Sequence[RewardComponent], running: WorkerCall[list[object]]) -> None:
        """Store what the methods return that a thread runs."""
        for component, value in zip(components, await running.result(), strict=True):
            self.keep(component, await maybe_await(value))

    def keep(self, component: RewardComponent, value: object) -> None:
        """Store what a method returned."""
        self.rewards[component.name] = as_reward(component, value, self.label(component))
        if self.judgements is not None and isinstance(value, Judgement):
            self.judged[component.name] = value
            self.judgements[:] = [self.judged[c.name] for c in self.components if c.name in self.judged]

    def method(self, component: RewardComponent) -> Callable[[], object]:
        """Return a component's method, to be called without arguments."""
        return functools.partial(method_of(self.env, component), self.episode)

    def label(self, component: RewardComponent) -> str:
        """Return what errors and threads call a component's method."""
        return f"{type(self.env).__name__}.{component.attribute}"
