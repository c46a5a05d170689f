"""Collector: verl's replay buffer, and what an algorithm asks of the rollout besides a batch of groups."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu

from agent_rl.algorithms import Algorithm, group_episodes
from agent_rl.backends.group_sampling import value_states
from agent_rl.backends.verl.driver.exchange import ReceivedBatch
from agent_rl.backends.verl.worker.branches import dump_branch
from agent_rl.backends.verl.worker.rows import episode_of
from agent_rl.core.episode import Episode
from agent_rl.gym.registry import spec
from agent_rl.rollout import Job
from agent_rl.store.episodes import EpisodeWriter


@dataclass(frozen=True, slots=True)
class Group:
    """The sampled episodes of one task, the keys of their rows in verl's queue, and the greedy one, if there is one."""

    episodes: list[Episode] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    greedy: list[Episode] = field(default_factory=list)


class Collector:
    """Stands in front of verl's replay buffer, whose place it takes in the trainer.

    A training batch is sampled as verl does; then, while the inference servers are still awake, groups that the
    algorithm's filters drop are made up for (dynamic sampling), greedy episodes are set apart, and states are valued by
    episodes that go on from them. Episodes of dropped groups are stored; greedy ones and continuations are not.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        algorithm: Algorithm,
        store: EpisodeWriter,
        submit: Callable[[TensorDict], object],
        *,
        env: str,
        samples: int,
        seed: int,
    ) -> None:
        """Take note of where things are; nothing is sampled.

        Args:
            buffer: verl's.
            algorithm: says what is asked for.
            store: where episodes of dropped groups go.
            submit: verl's `_submit_batch_to_rollout`.
            env: the environment's id.
            samples: episodes per task; a session with this number or a higher one is greedy.
            seed: the run's.
        """
        self._buffer, self._algorithm, self._store, self._submit = buffer, algorithm, store, submit
        self._env, self._samples, self._seed = env, samples, seed
        self._greedy: list[Episode] = []
        self._values: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the rows of a batch of `batch_size` groups, and metrics; fewer groups if there are not enough."""
        algorithm, several = self._algorithm, self._algorithm.config.refill.max_rounds > 1
        if partition_id != "train" or not (several or algorithm.needs_greedy or algorithm.needs_values):
            batch, metrics = self._buffer.sample(global_steps, partition_id, batch_size)
            return batch, metrics
        offered, groups, metrics = self._fill(global_steps, batch_size)
        self._greedy = [e for group in groups for e in group.greedy]
        keys = [key for group in groups for key in group.keys]
        tags = {key: tag for batch in offered for key, tag in zip(batch.keys, batch.tags, strict=True)}
        if unused := tags.keys() - keys:
            tq.kv_clear(keys=[*unused], partition_id=partition_id)
        if algorithm.needs_values:
            metrics |= self._value(global_steps, [e for group in groups for e in group.episodes])
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[tags[key] for key in keys]), metrics

    def add_to(self, received: ReceivedBatch) -> ReceivedBatch:
        """Return a batch that came back from the queue with what was asked for besides."""
        return replace(received, greedy=self._greedy, values=self._values)

    def _fill(self, step: int, target: int) -> tuple[list[KVBatchMeta], list[Group], dict[str, Any]]:
        """Sample until there are enough groups that the filters keep: everything sampled, the batch's groups, metrics.

        verl's trainer has submitted the tasks of the first round. If no group at all is worth a gradient, the last
        round's stand for the batch: verl needs rows to report on, and the filters drop them again.
        """
        refill = self._algorithm.config.refill
        state, batches, groups, metrics = refill.start(target), list[KVBatchMeta](), list[Group](), dict[str, Any]()
        last: list[Group] = []
        while n := state.groups_to_sample():
            if state.rounds:
                self._buffer.refill_fn(n)
            batch, found = self._buffer.sample(step, "train", n)
            last = self._groups(batch)
            state = state.update(self._worth(last) if refill.max_rounds > 1 else [True] * len(last))
            batches, groups, metrics = [*batches, batch], [*groups, *last], metrics | found
        taken = set(state.selected or range(len(groups) - len(last), len(groups)))
        for episode in (e for place, group in enumerate(groups) if place not in taken for e in group.episodes):
            self._store.write(episode)
        metrics |= {"rollout/rounds": float(state.rounds), "rollout/batch_filled": len(state.selected) / target}
        return batches, [groups[place] for place in sorted(taken)], metrics

    def _groups(self, batch: KVBatchMeta) -> list[Group]:
        """Read a batch's groups, in the order of their ids; one without a sampled episode is none."""
        groups: dict[str, Group] = {}
        for key, episode in zip(batch.keys, carried(batch), strict=True):
            prompt, session, _ = key.rsplit("_", 2)
            group, greedy = groups.setdefault(prompt, Group()), int(session) >= self._samples
            if not greedy:
                group.keys.append(key)
            if episode is not None:
                (group.greedy if greedy else group.episodes).append(episode)
        for group in groups.values():
            group.episodes.sort(key=lambda e: e.id)
        return sorted((g for g in groups.values() if g.episodes), key=lambda g: g.episodes[0].group_id)

    def _worth(self, groups: Sequence[Group]) -> list[bool]:
        """Whether the filters keep anything of each group."""
        episodes = [e for group in groups for e in group.episodes]
        kept = self._algorithm.experience(group_episodes(episodes)).kept.tolist() if episodes else []
        worthy = {e.group_id for e, keep in zip(episodes, kept, strict=True) if keep}
        return [group.episodes[0].group_id in worthy for group in groups]

    def _value(self, step: int, episodes: list[Episode]) -> dict[str, float]:
        """Value the states of the batch by running on from them; return the metrics of `StateValuePlan.values`."""
        rng = np.random.default_rng([4, self._seed, step])
        x, metrics = value_states(
            self._algorithm.experience(group_episodes(episodes)),
            episodes,
            spec(self._env),
            self._algorithm,
            rng,
            lambda jobs: self._continued(step, jobs),
        )
        self._values = {e.id: values for e, values in zip(episodes, x.state_values, strict=True)}
        return metrics

    def _continued(self, step: int, jobs: Sequence[Job]) -> list[Episode]:
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
        found = {key.split("_")[0]: episode for key, episode in rows if episode is not None}
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        if lost := len(branches) - len(found):
            raise RuntimeError(
                f"{lost} of {len(branches)} continuations did not come back from verl: what broke stands in the log of "
                "the agent loop's workers, at 'Error in _run_prompt'"
            )
        return [found[prompt] for prompt in branches]


def carried(batch: KVBatchMeta) -> list[Episode | None]:
    """Fetch the episode that each row of a batch carries."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    return [episode_of(fields) for fields in data.pop("extra_fields").tolist()]
