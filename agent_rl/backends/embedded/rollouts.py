"""Rollouts: sample the groups that a step learns from, with the engine's present weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from numpy.random import Generator
from torch import Tensor

from agent_rl.algorithms import Algorithm, Experience
from agent_rl.algorithms.dynamic_sampling import DynamicSampling
from agent_rl.backends.embedded.actor import Actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.processes import OneProcess
from agent_rl.backends.embedded.second_tries import SecondTries
from agent_rl.backends.group_sampling import (
    Groups,
    add_greedy,
    episodes_of,
    greedy_of,
    sample_groups,
    value_states,
    worth_training,
)
from agent_rl.core.episode import Episode, EpisodeGroup, Origin, Reward, group_episodes
from agent_rl.core.messages import Task
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import CheckpointError
from agent_rl.gym.mixture import assign, member_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import REFILL_START, RL_START
from agent_rl.judge.reward import evolving_judge
from agent_rl.policy.token import TokenPolicy
from agent_rl.rollout import Job, run_groups, run_jobs
from agent_rl.rollout.match import match_jobs, seats_of
from agent_rl.rollout.naming import names_of, seed_of
from agent_rl.seeds import Stream, rng
from agent_rl.store.arrays import pack_array
from agent_rl.store.codec import dump_line, load_line


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The groups that were sampled for one step, all of them with the same weights."""

    groups: list[EpisodeGroup]
    """All of them, in the order of their tasks, then those of tasks that were tried again; those of the batch with a
    greedy episode if the algorithm needs it."""
    sampling: DynamicSampling
    """How the batch came about; `selected` are the positions of its groups."""
    state_values: Tensor | None = None
    """`Experience.state_values` of the batch, if the algorithm needs them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of those values, of second tries, and of criteria that evolve."""
    tried_again: int = 0
    """How many of the groups, the last ones, are of tasks that were tried again."""
    seconds: float = 0.0
    tokens: int = 0

    @property
    def batch(self) -> list[EpisodeGroup]:
        """The groups to learn from; dynamic sampling drops the others."""
        return [self.groups[position] for position in self.sampling.selected]

    @property
    def hot(self) -> list[int]:
        """Which groups of the batch are of tasks that were tried again, at another temperature than the others."""
        first = len(self.groups) - self.tried_again
        return [number for number, position in enumerate(self.sampling.selected) if position >= first]

    @property
    def episodes(self) -> list[Episode]:
        """Every sampled episode, dropped ones too; these are stored."""
        return episodes_of(self.groups)

    @property
    def first_tries(self) -> list[Episode]:
        """The episodes that say how the policy does on tasks as they come."""
        return episodes_of(self.groups[: len(self.groups) - self.tried_again])

    def experience(self, algorithm: Algorithm) -> Experience:
        """Read the batch as the algorithm does."""
        x = algorithm.experience(self.batch)
        return x if self.state_values is None else replace(x, state_values=self.state_values)


class RolloutSampler:
    """Samples the batches of a run. All randomness is a function of (seed, step), whenever the step is sampled."""

    def __init__(self, spec: EnvSpec, actor: Actor, config: TrainConfig, algorithm: Algorithm) -> None:
        self.spec, self.actor, self.config, self.algorithm = spec, actor, config, algorithm
        self.tasks = spec.tasks.stream(config.split, config.seed)
        self.processes = OneProcess()
        self.second_tries = SecondTries()
        """Of all steps that were sampled."""

    def sample(self, step: int) -> StepBatch:
        """Sample all that a step needs with the engine's present weights."""
        started, before = time.perf_counter(), self.actor.engine.tokens
        plan = self.config.algorithm.refill.start(self.config.rollout.groups)
        groups, plan = sample_groups(
            plan, lambda first, n: self._groups(step, first, n), worth_training(self.algorithm)
        )
        found = self._try_again(step, StepBatch(groups, plan))
        groups, plan = found.groups, found.sampling
        if self.algorithm.needs_greedy:
            for position, group in zip(plan.selected, add_greedy(found.batch, self._greedy), strict=True):
                groups[position] = group
        if self.algorithm.needs_values:
            values, metrics = self.value(step, found.batch)
            found = replace(found, state_values=values, metrics=found.metrics | metrics)
        if (judge := evolving_judge()) is not None:
            found.metrics.update(asyncio.run(judge.learn(groups)))
        tokens = self.actor.engine.tokens - before
        return replace(found, seconds=time.perf_counter() - started, tokens=tokens)

    def params_of(self, step: int) -> SamplingParams:
        """Return what training samples with: nothing but the temperature, so that its log-probabilities are exact."""
        return self.actor.params(self.config.temperature_at(step), self.config.rollout.max_tokens)

    def value(self, step: int, groups: Groups) -> tuple[Tensor, dict[str, float]]:
        """Estimate the values of the states of a step's batch, as `group_sampling.value_states`."""
        config = self.config

        def run(jobs: list[Job]) -> list[Episode]:
            continued = self.run([replace(job, retries=config.retries) for job in jobs], self.params_of(step))
            order = rng(Stream.SHUFFLED_CONTINUATIONS, config.seed, step)
            return shuffled(continued, order) if config.shuffle_rewards else continued

        return value_states(groups, self.spec, self.algorithm, rng(Stream.STATE_VALUES, config.seed, step), run)

    def job(self, origin: Origin, task: Task, number: int, sampling: str = "", again: int = 0) -> Job:
        """Return an episode to run, named by `names_of`; ids tell a resumed run which ones it stored already."""
        group, id = names_of(origin, number, sampling=sampling)
        snapshots = self.algorithm.needs_values and origin.purpose == "train"
        env, args, task = assign(self.spec, self.config.env_args, task)
        seed = seed_of(origin, task, self.config.seed, again)
        retries = self.config.retries
        return Job(env, task, seed, group, env_args=args, id=id, origin=origin, snapshots=snapshots, retries=retries)

    def run(self, jobs: list[Job], params: SamplingParams) -> list[Episode]:
        """Run episodes with the engine's present weights."""
        return self.processes.spread(self.play, jobs, params)

    def play(self, jobs: Sequence[Job], params: SamplingParams) -> list[Episode]:
        """Run episodes in this process."""
        share = run_jobs(jobs, self._policy(params), concurrency=self.actor.engine.slots)
        return asyncio.run(self.processes.watched(share))

    def play_groups(self, jobs: Sequence[Job], params: SamplingParams) -> list[EpisodeGroup]:
        """Run groups in this process."""
        at_once = self.actor.engine.slots // (seats_of(self.spec) if self.config.self_play else 1)
        return asyncio.run(self.processes.watched(run_groups(jobs, self._policy(params), concurrency=at_once)))

    def _policy(self, params: SamplingParams) -> TokenPolicy:
        rollout = self.config.rollout
        return self.actor.policy(params, rollout.interrupt, rollout.shorten, rollout.delegate)

    def _groups(self, step: int, first: int, n: int) -> list[EpisodeGroup]:
        """Sample some of a step's groups."""
        config = self.config
        seats = seats_of(self.spec) if config.self_play else 1
        first, n = first // seats, -(-n // seats)  # a task has a group for each seat
        places = [self._place(step, group, seats) for group in range(first + n)]
        jobs = [
            self.job(Origin("train", config.split, step, sample), self.tasks.at(places[group]), group, again=again)
            for group in range(first, first + n)
            for again in [self.tasks.again(places[group], places[:group])]
            for sample in range(config.rollout.samples)
        ]
        if config.self_play:
            jobs = [seated for job in jobs for seated in match_jobs(job)]
        groups = self.processes.spread(self.play_groups, jobs, self.params_of(step), seats * config.rollout.samples)
        if not config.shuffle_rewards:
            return groups
        order = rng(Stream.SHUFFLED_REWARDS, config.seed, step, first)
        return group_episodes(shuffled(episodes_of(groups), order))

    def _place(self, step: int, number: int, seats: int) -> int:
        """Return where in the stream of tasks a step's task of this number is; the later ones refill."""
        groups, most = self.config.rollout.groups, self.config.algorithm.refill.most
        own, in_all = -(-groups // seats), -(-int(groups * most) // seats)
        if number < own:
            return RL_START + step * own + number
        return REFILL_START + step * (in_all - own) + number - own

    def _try_again(self, step: int, sampled: StepBatch) -> StepBatch:
        """Sample unsolved tasks once more, hotter; a group that succeeds by more than luck takes the first one's place.

        Where they are most of the batch, none is.
        """
        config, groups, selected, tries = self.config, sampled.groups, sampled.sampling.selected, self.second_tries
        params = self.params_of(step)
        hot = replace(params, temperature=config.rollout.retry_temperature or params.temperature)
        if hot.temperature <= params.temperature or config.shuffle_rewards:
            return sampled
        unsolved = {place: groups[place] for place in selected if not _is_solved(groups[place])}
        if not 0 < 2 * len(unsolved) <= len(selected):
            return sampled
        chosen = tries.choose(unsolved)
        seeds = rng(Stream.TRIED_AGAIN, config.seed, step)
        jobs = [
            self._second(first, number, int(seeds.integers(2**63)))
            for number, place in enumerate(chosen, len(groups))
            for first in groups[place].episodes
        ]
        again = self.processes.spread(self.play_groups, jobs, hot, config.rollout.samples)
        episodes = episodes_of(again)
        tries.observe(episodes)
        numbers = {
            place: number
            for number, (place, group) in enumerate(zip(chosen, again, strict=True), len(groups))
            if _is_solved(group) and tries.succeed_rarely(group)
        }
        plan = replace(sampled.sampling, selected=tuple(numbers.get(place, place) for place in selected))
        metrics = {
            "rollout/tried_again": len(again) / len(selected),
            "rollout/succeeded_then": sum(bool(episode.success) for episode in episodes) / len(episodes),
            "rollout/learned_then": len(numbers) / len(again),
        }
        return StepBatch([*groups, *again], plan, metrics=metrics, tried_again=len(again))

    def _second(self, first: Episode, number: int, seed: int) -> Job:
        """Return the second try of an episode, in the group of this number."""
        group, id = names_of(first.origin, number)
        snapshots = self.algorithm.needs_values
        return replace(self._job_of(first), seed=seed, group_id=group, id=id, snapshots=snapshots)

    def _greedy(self, groups: Groups) -> list[Episode]:
        """Run the first episode of each group again, greedily."""
        jobs = [
            replace(self._job_of(first), id=f"{first.group_id}-greedy", origin=replace(first.origin, greedy=True))
            for first in (group.episodes[0] for group in groups)
        ]
        return self.run(jobs, self.actor.params(0.0, self.config.rollout.max_tokens))

    def _job_of(self, episode: Episode) -> Job:
        """Return what ran an episode, but for its snapshots."""
        member, args, retries = member_of(self.spec, episode.env), episode.env_args, self.config.retries
        task, seed, group = episode.task, episode.seed, episode.group_id
        return Job(member, task, seed, group, env_args=args, id=episode.id, origin=episode.origin, retries=retries)


def _is_solved(group: EpisodeGroup) -> bool:
    return any(episode.success for episode in group.episodes)


def save_sampled(file: Path, batches: Iterable[StepBatch]) -> None:
    """Write batches of later steps; a resumed run can't sample them again, since their weights are gone."""
    kept = ("state_values", "metrics", "tried_again", "seconds", "tokens")
    rows = [
        {"episodes": _lines(b.episodes), "greedy": _lines(greedy_of(b.groups)), "refill": asdict(b.sampling)}
        | {name: getattr(b, name) for name in kept}
        for b in batches
    ]
    torch.save(rows, file)


def load_sampled(file: Path) -> list[StepBatch]:
    """Read what `save_sampled` wrote, without the episodes' snapshots: their states have values already.

    Raises:
        CheckpointError: if an earlier version wrote it in another form.
    """
    found = []
    for row in torch.load(file, weights_only=True):
        groups = group_episodes(_episodes(row.pop("episodes")), _episodes(row.pop("greedy")))
        try:
            found.append(StepBatch(groups, DynamicSampling(**row.pop("refill")), **row))
        except TypeError:
            raise CheckpointError(
                f"{file} holds batches that an earlier version of agent_rl sampled ahead: finish the run with that "
                f"version, or start a new one from its weights: start_from={file.parent}"
            ) from None
    return found


def _lines(episodes: Sequence[Episode]) -> str:
    return b"".join(dump_line(episode, experts=pack_array) for episode in episodes).decode()


def _episodes(lines: str) -> list[Episode]:
    return [load_line(line) for line in lines.encode().splitlines()]


def shuffled(episodes: Sequence[Episode], rng: Generator) -> list[Episode]:
    """Deal the episodes' total rewards out at random: a control from which nothing can be learned."""
    scored = [i for i, e in enumerate(episodes) if e.reward is not None]
    dealt = list(episodes)
    for i, j in zip(scored, rng.permutation(scored), strict=True):
        muted = (replace(reward, weight=0.0) for reward in episodes[i].rewards)
        dealt[i] = replace(episodes[i], rewards=(*muted, Reward("shuffled", episodes[j].reward, source="control")))
    return dealt
