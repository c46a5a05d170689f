"""Matches: the players of a game, each in an episode of its own, meet in one instance of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from agent_rl.core.episode import Episode, Reward
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Message, Step, Task
from agent_rl.core.meter import wait_uncounted
from agent_rl.errors import ConfigError, InfrastructureError
from agent_rl.gym.env import Env, Script
from agent_rl.gym.game import Game
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import episode_seed
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import AnyPolicy
from agent_rl.rollout.closing import close_env
from agent_rl.rollout.episode import EpisodeRun
from agent_rl.rollout.job import Job

_log = logging.getLogger(__name__)


def seats_of(spec: EnvSpec) -> int:
    """Return how many players an environment's game has.

    Raises:
        ConfigError: if it is none.
    """
    if "://" in spec.id:
        raise ConfigError(f"{spec.id} is on a server, where no players meet: play it here, or alone")
    if not issubclass(spec.cls, Game):
        raise ConfigError(f"{spec.id} is no game for several players: subclass ar.Game, or play it alone")
    return spec.cls.seats


def match_jobs(job: Job, policies: Sequence[AnyPolicy | None] | None = None) -> list[Job]:
    """Return the jobs of a match, one for each seat, in order: neighbours in whatever runs them.

    The samples of a seat are a group of their own, so that a baseline compares like with like. Names end with the seat.

    Args:
        job: the episode as if it were one.
        policies: of the seats; None for the policy that the jobs are run with.

    Raises:
        ConfigError: if the environment is no game, or there are more or fewer policies than players.
    """
    seats = seats_of(job.spec)
    if policies is not None and len(policies) != seats:
        raise ConfigError(f"{job.spec.id} has {seats} players, and {len(policies)} policies were given: one for each")
    return [
        replace(
            job,
            seed=job.seed if seat == 0 else episode_seed(job.seed, job.task, seat),
            group_id=f"{job.group_id}-seat{seat}",
            env_args={**job.env_args, "seat": seat},
            id=f"{job.id}-seat{seat}" if job.id else None,
            policy=policies[seat] if policies else None,
            in_match=True,
        )
        for seat in range(seats)
    ]


async def run_match(jobs: Sequence[Job], policy: AnyPolicy, runs: type[EpisodeRun] = EpisodeRun) -> list[Episode]:
    """Run the episodes of a match. One that fails ends the others, if the game is not over, as failures.

    The match is played again, all of it, as often as `Job.retries` says for the ending of one that failed by itself.

    Args:
        jobs: as `match_jobs` returns them; the first one's seed is the world's, too.
        policy: plays the seats that have none of their own.
        runs: what each player's episode is run by.
    """
    if [job.env_args.get("seat") for job in jobs] != list(range(seats_of(jobs[0].spec))):
        raise ConfigError("the jobs of a match are not neighbours: give all that match_jobs returned, in its order")
    attempt = 0
    while True:
        match = _Match(jobs[0], len(jobs))
        episodes = await _play(match, jobs, policy, runs)
        own = (episode.ending for seat, episode in enumerate(episodes) if seat not in match.ended_by_others)
        ending = next((each for each in own if attempt < jobs[0].retries.get(each, 0)), None)
        if ending is None:
            return episodes
        attempt += 1
        _log.info("%s, group %s: %s, so the match is run again", jobs[0].spec.id, jobs[0].group_id, ending)


async def _play(match: _Match, jobs: Sequence[Job], policy: AnyPolicy, runs: type[EpisodeRun]) -> list[Episode]:
    """Run the episodes of a match once."""

    async def sit(seat: int, job: Job) -> Episode:
        player = policy if job.policy is None else job.policy
        episode = await runs(job, player, _Seat(match, seat)).play()
        await match.leave(f"seat {seat} failed: {episode.error.message}" if episode.error else "")
        return episode

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sit(seat, job)) for seat, job in enumerate(jobs)]
    return [task.result() for task in tasks]


class _Match:
    """A game under way, and the players that wait for it."""

    game: Game

    def __init__(self, job: Job, seats: int) -> None:
        self._job, self._seated = job, seats
        self._changed = asyncio.Condition()
        self._opening: asyncio.Future[None] | None = None
        self._left = False
        """Whether a player's episode has ended, maybe before the game."""
        self._failure = ""
        self.ended_by_others = set[int]()
        """The seats that failed because another one had."""

    async def opened(self, task: Task, rng: np.random.Generator) -> None:
        """Make the game and begin it; the first player's numbers count."""
        if self._opening is None:
            self.game = cast(Game, self._job.spec.make(**self._job.env_args))
            self._opening = asyncio.ensure_future(self.game.open(task, rng))
        await self._opening

    async def close(self) -> None:
        """Close the game after the last player."""
        self._seated -= 1
        if not self._seated and self._opening is not None:
            await close_env(self.game, (self._job.budget or self._job.spec.budget).close_seconds)

    async def announce(self) -> None:
        """Let all who wait look at the game."""
        async with self._changed:
            self._changed.notify_all()

    async def leave(self, failure: str) -> None:
        """Let the others know that a player will not move again."""
        self._left, self._failure = True, self._failure or failure
        await self.announce()

    async def next(self, seat: int) -> Step:
        """Wait for a seat's turn, or for the end.

        Raises:
            InfrastructureError: if another player's episode failed before that.
        """
        game = self.game
        async with self._changed:
            turn = self._changed.wait_for(lambda: game.over or game.turn == seat or self._left)
            await wait_uncounted(turn)  # the others' replies are no time of this player's environment
        if self._failure and not game.over:
            self.ended_by_others.add(seat)
            raise InfrastructureError(self._failure)
        return Step(game.heard(seat), terminated=game.over, truncated=self._left and not game.over)


class _Seat(Env):
    """The game as one of its players meets it."""

    def __init__(self, match: _Match, seat: int) -> None:
        self._match, self._seat = match, seat

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return self._match.game.tools

    async def reset(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        await self._match.opened(task, rng)
        first = await self._match.next(self._seat)
        if first.terminated or first.truncated:
            self._match.ended_by_others.add(self._seat)
            raise InfrastructureError(f"the match ended before seat {self._seat} had a turn: there is nothing to score")
        return tuple(first.observation)

    async def step(self, action: Message) -> Step:
        await self._match.game.move(action)
        await self._match.announce()
        return await self._match.next(self._seat)

    async def close(self) -> None:
        await self._match.close()

    async def score(
        self, episode: Episode, seconds: float | None = None, judgements: list[Judgement] | None = None
    ) -> tuple[Reward, ...]:
        return await self._match.game.score(episode, seconds, judgements)

    def state_hash(self) -> str | Awaitable[str | None] | None:
        return self._match.game.state_hash()

    def oracle(self) -> Script:
        return self._match.game.oracle()

    def demonstrate(self, rng: np.random.Generator) -> Script:
        return self._match.game.demonstrate(rng)
