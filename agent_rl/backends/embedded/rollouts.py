"""Rollouts: everything that a step learns from, as the weights that the engine holds at the time sample it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agent_rl.algorithms import Algorithm, Experience, group_episodes
from agent_rl.algorithms.dynamic_sampling import DynamicSampling
from agent_rl.backends.embedded.actor import Actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.group_sampling import value_states
from agent_rl.core.episode import Episode, Origin, Reward
from agent_rl.engines.base import SamplingParams
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import RL_START, TaskStream, episode_seed
from agent_rl.policy.token import TokenPolicy
from agent_rl.rollout import Job, run_jobs
from agent_rl.store.codec import dump_line, load_line


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What was sampled for one step, all of it by the same weights."""

    episodes: list[Episode]
    """In groups, in the order of their tasks; dynamic sampling leaves some out of the batch."""
    refill: DynamicSampling
    """How the batch came about; `taken` are its groups."""
    greedy: list[Episode]
    """One for each group of the batch, if the algorithm compares with them; neither stored nor trained on."""
    state_values: Tensor | None
    """`Experience.state_values` of the batch, if the algorithm asks for them."""
    metrics: dict[str, float]
    """Of those values."""
    seconds: float
    tokens: int

    @property
    def batch(self) -> list[Episode]:
        """The episodes to learn from."""
        size = len(self.episodes) // self.refill.sampled
        return [e for group in self.refill.selected for e in self.episodes[group * size : (group + 1) * size]]

    def experience(self, algorithm: Algorithm) -> Experience:
        """Read the batch as the algorithm does."""
        x = algorithm.experience(group_episodes(self.batch, self.greedy))
        return x if self.state_values is None else replace(x, state_values=self.state_values)


class RolloutSampler:
    """Samples the batches of a run; all randomness hangs on (seed, step), whenever a step's turn comes."""

    def __init__(self, spec: EnvSpec, actor: Actor, config: TrainConfig, algorithm: Algorithm) -> None:
        self.spec, self.actor, self.config, self.algorithm = spec, actor, config, algorithm
        self.tasks = TaskStream(spec.tasks, config.split, config.seed)
        self.params = actor.params(config.rollout.temperature, config.rollout.max_tokens)
        """What training samples with: nothing but the temperature, so that its log-probabilities are exact."""

    def sample(self, step: int) -> StepBatch:
        """Sample all that a step needs with the engine's present weights."""
        started, before = time.perf_counter(), self.actor.engine.tokens
        episodes, refill = self._groups(step)
        found = StepBatch(episodes, refill, [], None, {}, 0.0, 0)
        if self.algorithm.needs_greedy:
            found = replace(found, greedy=self._greedy(step, refill))
        if self.algorithm.needs_values:
            x, metrics = self.value(step, found)
            found = replace(found, state_values=x.state_values, metrics=metrics)
        tokens = self.actor.engine.tokens - before
        return replace(found, seconds=time.perf_counter() - started, tokens=tokens)

    def policy(self, params: SamplingParams) -> TokenPolicy:
        """Return the student as a policy, for training and evaluation."""
        return self.actor.policy(params, self.config.rollout.interrupt)

    def _run(self, jobs: list[Job], params: SamplingParams) -> list[Episode]:
        return asyncio.run(run_jobs(jobs, self.policy(params), concurrency=self.actor.engine.slots))

    def _groups(self, step: int) -> tuple[list[Episode], DynamicSampling]:
        """Sample groups until the batch is full."""
        config, size = self.config, self.config.rollout.samples
        refill, episodes = config.algorithm.refill, list[Episode]()
        state = refill.start(config.rollout.groups)
        while groups := state.groups_to_sample():
            new = self._run(self._jobs(step, range(state.sampled, state.sampled + groups)), self.params)
            if config.shuffle_rewards:
                new = shuffled(new, np.random.default_rng([3, config.seed, step, state.sampled]))
            kept = self.algorithm.experience(group_episodes(new)).kept.view(groups, size).any(1)
            state = state.update(kept.tolist() if refill.max_rounds > 1 else [True] * groups)
            episodes += new
        return episodes, state

    def _greedy(self, step: int, state: DynamicSampling) -> list[Episode]:
        """Run each group of the batch once more, greedily: a baseline."""
        first = [self._jobs(step, range(group, group + 1))[0] for group in state.selected]
        jobs = [replace(j, id=f"{j.group_id}-greedy", origin=replace(j.origin, greedy=True)) for j in first]
        return self._run(jobs, replace(self.params, temperature=0.0))

    def value(self, step: int, sampled: StepBatch) -> tuple[Experience, dict[str, float]]:
        """Value the states of the batch by running on from them: episodes that are neither stored nor trained on."""
        config = self.config

        def run(jobs: list[Job]) -> list[Episode]:
            continued = self._run(jobs, self.params)
            rng = np.random.default_rng([5, config.seed, step])
            return shuffled(continued, rng) if config.shuffle_rewards else continued

        rng = np.random.default_rng([4, config.seed, step])
        x = self.algorithm.experience(group_episodes(sampled.batch, sampled.greedy))
        return value_states(x, sampled.batch, self.spec, self.algorithm, rng, run)

    def _jobs(self, step: int, groups: range) -> list[Job]:
        """The jobs of some of a step's groups; ids tell a resumed run what it already wrote."""
        config, jobs = self.config, []
        stride = int(config.rollout.groups * config.algorithm.refill.most)
        for group in groups:
            task = self.tasks.at(RL_START + step * stride + group)
            name = f"train-{step:05d}-{group:03d}"
            # a finite split meets a task again in a later step; the step keeps its episodes from repeating
            round_seed = config.seed * 1_000_003 + step
            for sample in range(config.rollout.samples):
                seed = episode_seed(round_seed, task, sample)
                jobs.append(
                    Job(
                        self.spec,
                        task,
                        seed,
                        name,
                        env_args=config.env_args,
                        id=f"{name}-{sample:02d}",
                        origin=Origin("train", config.split, step, sample),
                        snapshots=self.algorithm.needs_values,
                    )
                )
        return jobs


def save_sampled(file: Path, batches: Iterable[StepBatch]) -> None:
    """Write batches whose turn is yet to come; a resumed run could not sample them: the weights that did are gone."""
    rows = [
        {
            "episodes": _lines(b.episodes),
            "greedy": _lines(b.greedy),
            "refill": asdict(b.refill),
            "state_values": b.state_values,
            "metrics": b.metrics,
            "seconds": b.seconds,
            "tokens": b.tokens,
        }
        for b in batches
    ]
    torch.save(rows, file)


def load_sampled(file: Path) -> list[StepBatch]:
    """Read what `save_sampled` wrote; the episodes' snapshots are not there, nobody runs on from them any more."""
    rows = torch.load(file, weights_only=True)
    episodes = ("episodes", "greedy")
    return [
        StepBatch(
            **row | {name: _episodes(row[name]) for name in episodes} | {"refill": DynamicSampling(**row["refill"])}
        )
        for row in rows
    ]


def _lines(episodes: Sequence[Episode]) -> str:
    return b"".join(dump_line(episode, experts=True) for episode in episodes).decode()


def _episodes(lines: str) -> list[Episode]:
    return [load_line(line) for line in lines.encode().splitlines()]


def shuffled(episodes: Sequence[Episode], rng: np.random.Generator) -> list[Episode]:
    """Deal the episodes' total rewards out at random: a control from which nothing can be learned."""
    scored = [i for i, e in enumerate(episodes) if e.reward is not None]
    dealt = list(episodes)
    for i, j in zip(scored, rng.permutation(scored), strict=True):
        total = episodes[j].reward
        dealt[i] = replace(episodes[i], rewards=(*_muted(episodes[i]), Reward("shuffled", total, source="control")))
    return dealt


def _muted(episode: Episode) -> list[Reward]:
    return [replace(reward, weight=0.0) for reward in episode.rewards]
