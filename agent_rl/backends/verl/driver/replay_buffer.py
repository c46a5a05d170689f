"""The replay buffer of a run: verl's, extended by an algorithm's other requests to the rollout.

A training batch is sampled as verl does. Then, while the inference servers are still awake, groups that the filters
drop are replaced (dynamic sampling), greedy episodes are set apart, and states are valued by continuations.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu

from agent_rl.algorithms import Algorithm
from agent_rl.backends.group_sampling import (
    Groups,
    episodes_of,
    greedy_of,
    sample_groups,
    value_states,
    worth_training,
)
from agent_rl.backends.verl.driver.mini_batches import prompt_of
from agent_rl.backends.verl.driver.received import ReceivedBatch
from agent_rl.backends.verl.worker.rows import GROUP, dump_branch, episode_of
from agent_rl.core.episode import Episode, EpisodeGroup, Reward, group_episodes
from agent_rl.core.messages import JSON
from agent_rl.gym.mixture import member_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.rollout import Job, score_groups, summarise
from agent_rl.runs.metrics import MetricsFile
from agent_rl.seeds import Stream, rng
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.selection import episode_ids

EVALUATIONS = "val"
"""The partition of verl's queue that evaluations use."""


class EpisodeReplayBuffer:
    """Replaces verl's replay buffer in the trainer, and passes on to it what is not defined here.

    It stores the episodes of evaluations, of which verl keeps the scores only, and those of dropped groups. The trainer
    stores the others once they are checked. Greedy episodes and continuations are not stored.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        algorithm: Algorithm,
        store: EpisodeWriter,
        metrics: MetricsFile,
        submit: Callable[[TensorDict], object],
        *,
        env: EnvSpec,
        samples: int,
        seed: int,
    ) -> None:
        """Keep the parts; nothing is sampled.

        Args:
            buffer: verl's.
            algorithm: what to sample for.
            store: where the episodes of evaluations and of dropped groups go.
            metrics: where the results of evaluations go.
            submit: verl's `_submit_batch_to_rollout`.
            env: the environment, or a mixture.
            samples: episodes per task; a session with this number or a higher one is greedy.
            seed: the run's.
        """
        self._buffer, self._algorithm, self._store, self._submit = buffer, algorithm, store, submit
        self._metrics = metrics
        self._env, self._samples, self._seed = env, samples, seed
        self._stored = episode_ids(store.path)
        self._greedy: list[Episode] = []
        self._values: dict[str, Tensor] = {}
        self._rewarded: dict[str, tuple[Reward, ...]] = {}
        """The rewards of episodes whose groups were scored for the filters, by id: no judge is asked twice."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the rows of `batch_size` groups, and metrics; dynamic sampling may find fewer groups."""
        algorithm = self._algorithm
        several = algorithm.config.refill.max_rounds > 1
        if partition_id == "train" and (several or algorithm.needs_greedy or algorithm.needs_values):
            return self._sample_groups(global_steps, batch_size)
        batch, metrics = self._buffer.sample(global_steps, partition_id, batch_size)
        if partition_id == EVALUATIONS:
            self._store_evaluation(batch)
        return batch, metrics

    def add_to(self, received: ReceivedBatch) -> ReceivedBatch:
        """Return a batch that came back from the queue, with its group rewards, greedy episodes and state values."""
        if not self._rewarded:
            self._score(group_episodes(received.episodes))
        episodes = [replace(e, rewards=self._rewarded[e.id]) for e in received.episodes]
        self._rewarded = {}
        return replace(received, episodes=episodes, greedy=self._greedy, values=self._values)

    def _score(self, groups: Groups) -> list[EpisodeGroup]:
        """Call the environment's `@group_reward` methods."""

        async def score() -> list[list[EpisodeGroup]]:
            envs = (member_of(self._env, group.env) for group in groups)
            return await asyncio.gather(*(score_groups([g], env) for g, env in zip(groups, envs, strict=True)))

        scored = [group for (group,) in asyncio.run(score())]
        self._rewarded |= {e.id: e.rewards for e in episodes_of(scored)}
        return scored

    def _store_evaluation(self, batch: KVBatchMeta) -> None:
        """Store an evaluation: its episodes and its result. A resumed run repeats one, and stores it once."""
        episodes = [episode for episode in carried(batch) if episode is not None]
        for episode in episodes:
            if episode.id not in self._stored:
                self._store.write(episode)
                self._stored.add(episode.id)
        self._store.flush()
        if episodes:
            origin = episodes[0].origin
            row = summarise(episodes).row(origin.split, "greedy" if origin.greedy else "sampled")
            self._metrics.write("eval", origin.step or 0, row)

    def _sample_groups(self, step: int, target: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Sample groups until the batch is full, and all that the algorithm needs with them."""
        metrics, rows = dict[str, Any](), _RowIndex()
        self._rewarded = {}
        rounds: list[Groups] = []

        def run(first: int, n: int) -> Groups:
            if rounds:  # verl's trainer has submitted the tasks of the first round
                self._buffer.refill_fn(n)
            batch, found = self._buffer.sample(step, "train", n)
            metrics.update(found)
            rounds.append(self._read(batch, rows))
            return rounds[-1]

        groups, plan = sample_groups(self._algorithm.config.refill.start(target), run, worth_training(self._algorithm))
        # verl needs rows to report on: without a group worth training on, the last round is the batch, and its rows
        # are dropped by the filters again
        selected = set(plan.selected or range(len(groups) - len(rounds[-1]), len(groups)))
        for episode in episodes_of([group for place, group in enumerate(groups) if place not in selected]):
            self._store.write(episode)
        chosen = [groups[place] for place in sorted(selected)]
        self._greedy = greedy_of(chosen)
        keys = [key for group in chosen for key in rows.keys[group.id]]
        if unused := rows.tags.keys() - keys:
            tq.kv_clear(keys=[*unused], partition_id="train")
        metrics |= {"rollout/rounds": float(plan.rounds), "rollout/batch_filled": len(plan.selected) / target}
        if self._algorithm.needs_values:
            metrics |= self._value(step, chosen)
        return KVBatchMeta(partition_id="train", keys=keys, tags=[rows.tags[key] for key in keys]), metrics

    def _read(self, batch: KVBatchMeta, rows: _RowIndex) -> list[EpisodeGroup]:
        """Read a batch's groups, in the order of their ids, and index its rows; greedy sessions are no members."""
        sampled, greedy, group_of = list[Episode](), list[Episode](), dict[str, str]()
        rows.tags |= dict(zip(batch.keys, batch.tags, strict=True))
        for key, episode in zip(batch.keys, carried(batch), strict=True):
            prompt, session, _ = key.rsplit("_", 2)
            if episode is not None:
                group_of[prompt] = episode.group_id
                (greedy if int(session) >= self._samples else sampled).append(episode)
        for key in batch.keys:
            prompt, session, _ = key.rsplit("_", 2)
            if int(session) < self._samples and prompt in group_of:
                rows.keys.setdefault(group_of[prompt], []).append(key)
        return self._score(group_episodes(sorted(sampled, key=lambda e: (e.group_id, e.id)), greedy))

    def _value(self, step: int, groups: Groups) -> dict[str, float]:
        """Estimate the values of the batch's states by continuations; return their metrics."""
        draws = rng(Stream.STATE_VALUES, self._seed, step)
        values, metrics = value_states(
            groups, self._env, self._algorithm, draws, lambda jobs: self._continue(step, jobs)
        )
        self._values = {e.id: of_turns for e, of_turns in zip(episodes_of(groups), values, strict=True)}
        return metrics

    def _continue(self, step: int, jobs: Sequence[Job]) -> list[Episode]:
        """Have continuations run by verl's workers, and return them in order.

        Raises:
            RuntimeError: if one did not come back.
        """
        if not jobs:
            return []
        branches = {str(uuid.uuid4()): dump_branch(job.branch) for job in jobs if job.branch is not None}
        each = {"index": [0] * len(branches), "__rollout_n__": [1] * len(branches)}
        submitted = tu.get_tensordict({"uid": list(branches), "branch": list(branches.values()), **each})
        tu.assign_non_tensor_data(submitted, "global_steps", step)
        self._submit(submitted)
        batch, _ = self._buffer.sample(step, "train", len(branches))
        rows = zip(batch.keys, carried(batch), strict=True)
        found = {prompt_of(key): episode for key, episode in rows if episode is not None}
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        if lost := len(branches) - len(found):
            raise RuntimeError(
                f"{lost} of {len(branches)} continuations did not come back from verl: the cause is in the log of the "
                "agent loop's workers, at 'Error in _run_prompt'"
            )
        return [found[prompt] for prompt in branches]


@dataclass(slots=True)
class _RowIndex:
    """The rows of verl's queue that were read for a batch."""

    keys: dict[str, list[str]] = field(default_factory=dict)
    """By group, without greedy ones."""
    tags: dict[str, Any] = field(default_factory=dict)
    """By key, of all rows."""


def carried(batch: KVBatchMeta) -> list[Episode | None]:
    """Return the episode that each row of a batch carries."""
    return [episode_of(fields) for fields in _extra_fields(batch)]


def groups_of(batch: KVBatchMeta) -> dict[str, str]:
    """Return the group of each prompt in a batch, as the first rows of its episodes say it."""
    rows = zip(batch.keys, _extra_fields(batch), strict=True)
    return {prompt_of(key): str(fields[GROUP]) for key, fields in rows if GROUP in fields}


def _extra_fields(batch: KVBatchMeta) -> list[dict[str, JSON]]:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    found: list[dict[str, JSON]] = data.pop("extra_fields").tolist()
    return found
