"""Groups: run the samples of tasks, and reward what only shows when they are compared."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TypeAlias

from agent_rl.concurrency import ENDING, call
from agent_rl.core.episode import Episode, EpisodeGroup, Reward, group_episodes
from agent_rl.core.judgement import Judgement
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.reward import RewardComponent, as_reward, method_of
from agent_rl.policy.base import AnyPolicy
from agent_rl.rollout.closing import close_env
from agent_rl.rollout.job import Job
from agent_rl.rollout.pool import run_jobs, stream_jobs

_log = logging.getLogger(__name__)

Scored: TypeAlias = tuple[Reward, Judgement | None]


async def run_groups(jobs: Sequence[Job], policy: AnyPolicy, *, concurrency: int = 64) -> list[EpisodeGroup]:
    """Run whole groups with `run_jobs`, and score them.

    Neighbours with the same `group_id` are a group, of one environment, in matches those of the same seat.
    """
    episodes = await run_jobs(jobs, policy, concurrency=concurrency)
    tasks = itertools.groupby(episodes, lambda e: e.group_id.removesuffix(f"-seat{e.seat}"))
    groups = [group for _, members in tasks for group in group_episodes(list(members))]
    job_of = {job.group_id: job for job in jobs}
    if not any(job.spec.cls.group_reward_components for job in job_of.values()):
        return groups
    of_group = [job_of[group.id] for group in groups]
    scored = (score_groups([g], job.spec, job.budget) for g, job in zip(groups, of_group, strict=True))
    return [group for (group,) in await asyncio.gather(*scored)]


async def stream_finished(
    jobs: Sequence[Job], policy: AnyPolicy, *, concurrency: int = 64
) -> AsyncGenerator[tuple[Episode, ...], None]:
    """Yield episodes as they are finished and scored: each by itself, or by groups if `@group_reward` compares them.

    A caller that may stop early closes the generator (`contextlib.aclosing`).
    """
    sizes = Counter(job.group_id for job in jobs)
    members: dict[str, list[tuple[int, Episode]]] = defaultdict(list)
    async with contextlib.aclosing(stream_jobs(jobs, policy, concurrency=concurrency)) as stream:
        async for index, episode in stream:
            if not jobs[index].spec.cls.group_reward_components:
                yield (episode,)
                continue
            group = members[episode.group_id]
            group.append((index, episode))
            if len(group) == sizes[episode.group_id]:
                in_order = tuple(e for _, e in sorted(group, key=lambda entry: entry[0]))
                job = jobs[index]
                (scored,) = await score_groups([EpisodeGroup(episode.group_id, in_order)], job.spec, job.budget)
                yield scored.episodes


async def score_groups(
    groups: Sequence[EpisodeGroup], spec: EnvSpec, budget: Budget | None = None
) -> list[EpisodeGroup]:
    """Add to each episode what the environment's `@group_reward` methods say of it.

    Each group gets an instance of the environment that is not reset, and closed afterwards. Failed episodes are passed
    over. A method that raises, or is not done in time, leaves its component unscored, with the reason, which is logged.

    Args:
        groups: finished; baselines are not scored.
        spec: their environment.
        budget: instead of the environment's own; `score_seconds` is for each method.
    """
    if not spec.cls.group_reward_components:
        return list(groups)
    return list(await asyncio.gather(*(_score(group, spec, budget or spec.budget) for group in groups)))


async def _score(group: EpisodeGroup, spec: EnvSpec, budget: Budget) -> EpisodeGroup:
    finished = replace(group, episodes=tuple(e.with_own_task() for e in group.episodes if e.trainable))
    if not finished.episodes:
        return group
    components = spec.cls.group_reward_components
    try:
        env = spec.make(**finished.episodes[0].env_args)
    except BaseException as error:  # of the user's own constructor
        if isinstance(error, ENDING):
            raise
        reason = f"{type(error).__name__}: {error}"
        columns = [
            _unscored(component, finished, f"{spec.id}.{component.attribute}", reason) for component in components
        ]
    else:
        try:
            columns = await asyncio.gather(*(_component(env, c, finished, budget.score_seconds) for c in components))
        finally:
            try:
                await close_env(env, budget.close_seconds)
            except BaseException as error:
                if isinstance(error, ENDING):
                    raise
                problem = f"{spec.id}: close() failed: {type(error).__name__}: {error}"
                warnings.warn(problem, RuntimeWarning, stacklevel=2)
    earned = dict(zip((e.id for e in finished.episodes), zip(*columns, strict=True), strict=True))
    return replace(group, episodes=tuple(_with(e, earned.get(e.id, ())) for e in group.episodes))


def _with(episode: Episode, earned: Sequence[Scored]) -> Episode:
    of_group = (reward.without_gain if episode.has_ended_sandbox else reward for reward, _ in earned)
    rewards = (*episode.rewards, *of_group)
    judgements = (*episode.judgements, *(judgement for _, judgement in earned if judgement is not None))
    return replace(episode, rewards=rewards, judgements=judgements)


async def _component(env: Env, component: RewardComponent, group: EpisodeGroup, seconds: float | None) -> list[Scored]:
    """Return one component's reward of each episode, with a judge's judgement."""
    where = f"{type(env).__name__}.{component.attribute}"
    method = method_of(env, component)
    try:
        async with asyncio.timeout(seconds) as clock:
            found = await call(functools.partial(method, group), thread=None if component.is_async else where)
        return _scored(component, found, len(group.episodes), where)
    except BaseException as error:  # of the user's own method, or a service that it asks
        if isinstance(error, ENDING):
            raise
        late = isinstance(error, TimeoutError) and clock.expired()
        reason = f"{where} took more than {seconds:g} s" if late else f"{type(error).__name__}: {error}"
        return _unscored(component, group, where, reason)


def _unscored(component: RewardComponent, group: EpisodeGroup, where: str, reason: str) -> list[Scored]:
    _log.warning("group %s: group reward %s failed: %.300s", group.id, where, reason)
    return [(Reward(component.name, None, component.weight, "group", error=reason), None) for _ in group.episodes]


def _scored(component: RewardComponent, values: object, n: int, where: str) -> list[Scored]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise TypeError(f"group reward {where} returned {values!r}; return one value per episode")
    found: list[Scored] = [
        (as_reward(component, value, where, "group"), value if isinstance(value, Judgement) else None)
        for value in values
    ]
    if len(found) != n:
        raise ValueError(f"group reward {where} returned {len(found)} values for {n} episodes; return one per episode")
    return found
