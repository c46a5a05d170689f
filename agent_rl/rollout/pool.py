"""Many episodes at once: groups of samples of one task, a bounded number under way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from agent_rl.concurrency import PlayerTask
from agent_rl.core.episode import Episode, Origin
from agent_rl.core.messages import JSON, Task
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.mixture import MixedTasks, Mixture
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import episode_seed, task_key
from agent_rl.policy.base import AnyPolicy
from agent_rl.rollout.episode import run_episode
from agent_rl.rollout.job import ROLLOUT, Job
from agent_rl.rollout.match import run_match, seats_of

JUDGED_BESIDE = 4
"""How many episodes may wait for judges, by those that may be under way: each keeps its environment open."""
GARBAGE = 10
"""Objects that an episode under way may leave to the garbage collector before it looks. At its own threshold it would
look at everything that thousands of episodes hold, again and again, which took half of their time."""


def group_jobs(
    spec: EnvSpec,
    task: Task,
    samples: int,
    run_seed: int,
    *,
    origin: Origin = ROLLOUT,
    budget: Budget | None = None,
    env_args: Mapping[str, JSON] | None = None,
) -> list[Job]:
    """Return the jobs of one group: `samples` episodes of the same task that differ in their seeds only."""
    group = f"{task_key(task)}-{run_seed}"
    return [
        Job(
            spec,
            task,
            episode_seed(run_seed, task, sample),
            group,
            budget,
            env_args or {},
            origin=replace(origin, sample=sample),
        )
        for sample in range(samples)
    ]


def split_jobs(
    spec: EnvSpec,
    n: int,
    samples: int,
    run_seed: int,
    *,
    origin: Origin,
    budget: Budget | None = None,
    env_args: Mapping[str, JSON] | None = None,
) -> list[Job]:
    """Return the jobs of the first `n` tasks of the origin's split, a group each; fewer if it has not as many.

    A mixture's tasks are divided by its weights, and the arguments are its own. Groups of equal tasks, which a split
    and the environments of a mixture may have, differ in their ids.

    Raises:
        ConfigError: if there is no such split, or its file can't be read.
    """
    if isinstance(spec, Mixture) and isinstance(spec.tasks, MixedTasks):
        parts = zip(spec.members, spec.tasks.divide(n), strict=True)
        groups = [
            group
            for (member, args, _), share in parts
            for group in _split_groups(member, share, samples, run_seed, origin, budget, args)
        ]
    else:
        groups = _split_groups(spec, n, samples, run_seed, origin, budget, env_args)
    before, jobs = Counter[str](), list[Job]()
    for group in groups:
        times, before[group[0].group_id] = before[group[0].group_id], before[group[0].group_id] + 1
        jobs += [replace(job, group_id=f"{job.group_id}-{times}") for job in group] if times else group
    return jobs


def _split_groups(
    spec: EnvSpec,
    n: int,
    samples: int,
    run_seed: int,
    origin: Origin,
    budget: Budget | None,
    env_args: Mapping[str, JSON] | None,
) -> list[list[Job]]:
    """Return the jobs of each of the first `n` tasks."""
    size = spec.tasks.size(origin.split)
    order = (
        spec.tasks.stream(origin.split, run_seed).at if spec.tasks.shuffle else partial(spec.tasks.get, origin.split)
    )
    tasks = map(order, range(n if size is None else min(n, size)))
    return [group_jobs(spec, t, samples, run_seed, origin=origin, budget=budget, env_args=env_args) for t in tasks]


async def run_jobs(
    jobs: Sequence[Job],
    policy: AnyPolicy,
    *,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Run all jobs, at most `concurrency` at a time; return their episodes in the order of the jobs.

    Args:
        jobs: what to run.
        policy: who plays.
        concurrency: how many episodes may be under way.
        on_episode: called with each episode as it ends.

    Raises:
        ConfigError: if `concurrency` is below 1.
    """
    episodes: dict[int, Episode] = {}
    workers = min(concurrency, max(1, len(jobs)))
    async with contextlib.aclosing(stream_jobs(jobs, policy, concurrency=workers)) as stream:
        async for index, episode in stream:
            episodes[index] = episode
            if on_episode is not None:
                on_episode(episode)
    return [episodes[index] for index in range(len(jobs))]


async def stream_jobs(
    jobs: Iterable[Job], policy: AnyPolicy, *, concurrency: int = 64
) -> AsyncGenerator[tuple[int, Episode], None]:
    """Yield `(index of the job, episode)` as episodes end; jobs are drawn as there is room for them.

    A match is drawn whole, and counts once in `concurrency`. An episode that waits for judges counts no longer, up to a
    limit, so that a slow judge does not keep others from being played.

    A caller that may stop early closes the generator (`contextlib.aclosing`): that cancels what is under way.

    Raises:
        ConfigError: if `concurrency` is below 1.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency={concurrency}: let at least one episode be under way")
    source = enumerate(jobs)
    ended: asyncio.Queue[tuple[int, Episode] | None] = asyncio.Queue()
    beside = _Beside(JUDGED_BESIDE * concurrency)

    async def play(index: int, job: Job, before_judges: Callable[[], Awaitable[None]] | None = None) -> None:
        player = policy if job.policy is None else job.policy
        ended.put_nowait((index, await run_episode(job, player, before_judges=before_judges)))

    async def work() -> None:
        try:
            for index, job in source:
                if job.in_match:
                    match = [job, *(other for _, other in islice(source, seats_of(job.spec) - 1))]
                    for seat, episode in enumerate(await run_match(match, policy)):
                        ended.put_nowait((index + seat, episode))
                elif job.spec.cls.is_judged:
                    await beside.begin(partial(play, index, job))
                else:
                    await play(index, job)
            await beside.finish()
        finally:
            ended.put_nowait(None)

    _streams.begin(concurrency)
    loop = asyncio.get_running_loop()
    workers = [PlayerTask(work(), loop=loop) for _ in range(concurrency)]
    try:
        for _ in workers:
            while (entry := await ended.get()) is not None:
                yield entry
        await asyncio.gather(*workers)  # raises what broke a worker: not an episode, but the source of jobs
    finally:
        tasks = (*workers, *beside.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _streams.end(concurrency)


class _Beside:
    """Episodes that judges score while others are played: a task each, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.tasks = set[asyncio.Task[None]]()
        self._places = asyncio.Semaphore(limit)
        self._broken: list[BaseException] = []

    async def begin(self, play: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]) -> None:
        """Run an episode, given what it awaits before its judges; return once others may be played."""
        played = asyncio.Event()
        task = PlayerTask(self._run(play, played), loop=asyncio.get_running_loop())
        self.tasks.add(task)
        task.add_done_callback(self._forget)
        await played.wait()

    async def finish(self) -> None:
        """Wait for all; raise what broke one: not an episode, but how it is run."""
        while self.tasks:
            await asyncio.wait(self.tasks)
        for error in self._broken:
            raise error

    async def _run(
        self, play: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]], played: asyncio.Event
    ) -> None:
        async def before_judges() -> None:
            if not played.is_set():  # it is, if the episode is run again
                await self._places.acquire()
                played.set()

        try:
            await play(before_judges)
        finally:
            if played.is_set():
                self._places.release()
            played.set()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken.append(error)


class _Streams:
    """How many episodes all streams may have under way, and the garbage collector's thresholds meanwhile."""

    def __init__(self) -> None:
        self._running = 0
        self._usual = gc.get_threshold()

    def begin(self, concurrency: int) -> None:
        """Look for garbage less often."""
        if not self._running:
            self._usual = gc.get_threshold()
        self._change(concurrency)

    def end(self, concurrency: int) -> None:
        """Look as often as the other streams allow; as before, if there are none."""
        self._change(-concurrency)

    def _change(self, by: int) -> None:
        self._running += by
        first, *later = self._usual
        gc.set_threshold(first and max(first, GARBAGE * self._running), *later)


_streams = _Streams()
