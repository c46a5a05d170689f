"""The updates of a step on verl: mini-batches of whole groups, each a call of the workers of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.utils.padding import response_from_nested

from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.backends.verl.driver.canary import check_rollout_gap, data_parallel_size
from agent_rl.backends.verl.driver.exchange import SentBatch, averaged, prepare, reported
from agent_rl.backends.verl.driver.mini_batches import Cut
from agent_rl.backends.verl.driver.replay_buffer import groups_of
from agent_rl.backends.verl.worker.engine import STEP
from agent_rl.backends.verl.worker.routes import REPLAYED, replay_routes


class UpdatingTrainer(PPOTrainer):
    """verl's trainer with our updates, on the batch that it has weighed.

    Each is a call of its own, so that an objective can compare all rows of an episode under the weights as they are
    before it; with parameters or optimizer offloaded, each loads them.
    """

    algorithm: Algorithm
    routes: tuple[str, ...]
    """Fields of verl's queue, see `routes.route_fields`."""
    weighed: SentBatch
    """The batch of this step."""
    mini_batch_of: Sequence[int] = ()
    """Which update of a pass takes each row of verl's; empty if one takes them all."""
    on_policy: bool = False
    """Whether the first update of a step begins with the weights that sampled its batch."""

    @property
    def _mini_batches(self) -> int:
        """How many updates a pass over the batch takes."""
        return int(self.config.data.train_batch_size // self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return what the number of an update's rows must be divisible by.

        By ranks; with micro-batches of a fixed number of rows, by those of an update without forks, which fit them.
        """
        model = self.config.actor_rollout_ref
        if model.actor.use_dynamic_bsz and model.rollout.log_prob_use_dynamic_bsz:
            return dp_size
        return math.lcm(dp_size, model.actor.ppo_mini_batch_size * model.rollout.n)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, float], *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Pad and balance the batch as verl does, in mini-batches of whole groups if there are to be several.

        verl copies padding from the first row, which it fetches whole: with routes, that is the shortest.
        """
        if self.routes:
            shortest = min(range(len(batch)), key=lambda row: int(batch.tags[row]["seq_len"]))
            batch.reorder([shortest, *(row for row in range(len(batch)) if row != shortest)])
        self.mini_batch_of = []
        if self._mini_batches == 1:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        run, ranks = self.config.data.agent_rl, data_parallel_size(self.actor_rollout_wg)
        updates = UpdatesConfig(minibatches=self._mini_batches, shuffle=run.shuffle)
        multiple = self._get_required_batch_multiple(ranks)
        cut = Cut.of(batch.keys, groups_of(batch), updates, multiple, run.seed, self.global_steps)
        batch = upsample_batch_to_divisible_size(batch, sum(cut.sizes), self.tokenizer.eos_token_id)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        self.mini_batch_of = cut.order(batch, ranks)
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Take the critic's updates, on the same rows as the policy's."""
        taken = list[TensorDict]()
        for rows in self._updates(self.config.critic.ppo_epochs):
            self._instruct(part := _taken(batch, rows))
            taken.append(self.critic_wg.train_mini_batch(part).get())
        metrics |= reported(taken, "critic")
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Take `ppo_epochs` updates on each mini-batch, each a call of its own, until theta has left old too far."""
        limit = self.config.data.agent_rl.target_kl
        taken, prepared = list[TensorDict](), list[dict[str, float]]()
        for rows in self._updates(self.config.actor_rollout_ref.actor.ppo_epochs):
            part, ours = _taken(batch, rows), self.weighed.rows_with_gradient(rows)
            prepares, watched = self.algorithm.prepares(self.weighed.batch.select(ours)), taken and limit is not None
            if prepares or watched:
                theta = self._theta(part, rows, first=not taken)
                if watched and self.weighed.old_kl(theta, ours) > limit:
                    break
            if prepares:
                sent, found = prepare(self.algorithm, self.weighed, theta, rows)
                prepared.append(found)
                part = put(part, sent)
            self._instruct(part)
            with self._replaying(part):
                output = self.actor_rollout_wg.update_actor(part)
            if self.on_policy and not taken:
                check_rollout_gap(output["metrics"], self.config.data.agent_rl.max_rollout_gap, self.global_steps)
            taken.append(output)
        metrics |= reported(taken, "actor") | averaged(prepared)
        metrics["train/updates"] = float(len(taken))
        return batch

    def _updates(self, epochs: int) -> list[list[int]]:
        """Return the rows of verl's of every update; none where no row has a gradient: momentum alone is no step."""
        return self.weighed.mini_batches * epochs

    def _theta(self, batch: KVBatchMeta, rows: Sequence[int], *, first: bool) -> Tensor:
        """Return log-probabilities of an update's rows under the weights as they are, `[N]`; 0 for other rows.

        Before a step's first update they are old's, if those were computed: in this step, so with these weights.
        """
        if first and self.local_trigger_step == 0 and self.algorithm.config.recomputes_old:
            return self.weighed.batch.scored.old_logprobs
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
        with self._replaying(batch):
            self.actor_rollout_wg.compute_log_prob(batch)
        return self.weighed.by_token(responses_of(batch, "log_probs").unbind(), rows)

    def _replaying(self, batch: KVBatchMeta) -> AbstractContextManager[None]:
        """Have theta take the routes that the algorithm replays."""
        return replay_routes(batch.extra_info, REPLAYED[self.algorithm.config.routing.replay])

    def _instruct(self, batch: KVBatchMeta) -> None:
        """Tell the workers to take one update of a batch."""
        batch.extra_info.update(
            global_batch_size=len(batch),
            mini_batch_size=len(batch),
            epochs=1,
            seed=0,  # of a shuffle that is off
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            calculate_entropy=self.algorithm.config.entropy > 0,
            distillation_use_topk=False,
            distillation_only=False,
        )
        batch.extra_info[STEP] = self.global_steps


def _taken(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    """Return some rows of a batch."""
    return batch.select_keys([batch.keys[row] for row in rows])


def responses_of(batch: KVBatchMeta, name: str) -> Tensor:
    """Fetch what an engine computed for whole rows; return it for their responses, nested."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name, "response_mask"])
    found: Tensor = response_from_nested(data[name], data["response_mask"])
    return found


def put(batch: KVBatchMeta, fields: TensorDict) -> KVBatchMeta:
    """Send fields; return a batch that lists them, as an earlier one may list the old fields only."""
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
