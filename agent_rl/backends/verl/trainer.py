"""The driver's side: verl's trainers, with advantages, corrections and denominators from `agent_rl.algorithms`."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.utils.padding import response_from_nested

from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.exchange import COMPUTED, Weighed, prepare, receive, weigh
from agent_rl.backends.verl.expected import require_metrics
from agent_rl.backends.verl.loss import loss_function, value_loss_function
from agent_rl.store.episodes import EpisodeWriter


class AlgorithmTrainer(PPOTrainer):
    """What is changed in verl's trainers; mixed in front of each of them."""

    algorithm: Algorithm
    store: EpisodeWriter
    weighed: Weighed
    """The batch of this step, for objectives that prepare it before each update."""
    checked: bool = False
    """Whether a step has reported all that the algorithm asks for."""

    def _setup(self) -> None:
        settings = self.config.data.agent_rl
        self.algorithm = Algorithm(AlgorithmConfig.model_validate_json(settings.algorithm))
        super()._setup()
        self.store = EpisodeWriter(settings.episodes)
        self.actor_rollout_wg.set_loss_fn(loss_function(self.algorithm.config))
        if self.use_critic:
            self.critic_wg.set_loss_fn(value_loss_function(self.algorithm.config))

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self.algorithm.needs_theta:  # each update is a call of its own, after which verl's schedule moves on
            actor = self.config.actor_rollout_ref.actor
            with open_dict(actor):
                actor.optim.total_training_steps *= actor.ppo_epochs
                actor.optim.lr_warmup_steps *= actor.ppo_epochs if actor.optim.lr_warmup_steps > 0 else 1

    def step(self, metrics: dict[str, float], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Take a step; the first one that learns must report all that the algorithm has.

        Raises:
            ConfigError: if a feature of the algorithm left no trace in the metrics.
        """
        batch = super().step(metrics, timing_raw)
        if (
            not self.checked
            and metrics.get("train/samples", 1)
            and self.config.trainer.critic_warmup <= self.global_steps
        ):
            require_metrics(self.algorithm.config, metrics)
            self.checked = True
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Score the batch under old, and where the advantage asks for it say how sure old was."""
        if not self.algorithm.needs_distributions:
            return super()._compute_old_log_prob(batch, metrics)
        batch.extra_info["calculate_sum_pi_squared"] = True
        batch = super()._compute_old_log_prob(batch, metrics)  # another, which asks the reference for none
        return _put(batch, TensorDict({"sum_pi_squared": _responses(batch, "sum_pi_squared")}, len(batch)))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Weigh the batch, and send every row what the loss reads."""
        names = ["prompts", "responses", "response_mask", "extra_fields", *COMPUTED.values()]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        received = receive(batch.keys, data.pop("extra_fields").tolist(), padding)
        for episode in received.episodes:
            self.store.write(episode)
        self.store.flush()
        self.weighed = weigh(self.algorithm, received, data)
        metrics |= self.weighed.metrics
        return _put(batch, self.weighed.sent)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Take `ppo_epochs` updates of the critic, each on the whole batch."""
        self._whole(batch, self.config.critic.ppo_epochs)
        metrics |= _reported(self.critic_wg.train_mini_batch(batch).get(), "critic")
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Take `ppo_epochs` updates, each on the whole batch: its denominators are those of the whole."""
        updates = self.config.actor_rollout_ref.actor.ppo_epochs
        if not self.algorithm.needs_theta:
            self._whole(batch, updates)
            metrics |= _reported(self.actor_rollout_wg.update_actor(batch), "actor")
            return batch
        for number in range(updates):
            sent, found = prepare(self.algorithm, self.weighed, self._theta(batch, number))
            batch = _put(batch, sent)
            self._whole(batch, 1)
            metrics |= found | _reported(self.actor_rollout_wg.update_actor(batch), "actor")
        return batch

    def _theta(self, batch: KVBatchMeta, number: int) -> Tensor:
        """Return log-probabilities of the whole batch under the weights as they are, before update `number`; `[B, T]`.

        Before the first update they are old's, if those were computed: in this step, so with these weights.
        """
        if number == self.local_trigger_step == 0 and self.algorithm.config.proximal == "recompute":
            return self.weighed.batch.old_logprobs
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
        self.actor_rollout_wg.compute_log_prob(batch)
        return self.weighed.by_token(_responses(batch, "log_probs").unbind())

    def _whole(self, batch: KVBatchMeta, updates: int) -> None:
        """Tell the workers that an update takes the whole batch."""
        batch.extra_info.update(
            global_batch_size=len(batch),
            mini_batch_size=len(batch),
            epochs=updates,
            seed=0,  # of an order that nobody shuffles
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            calculate_entropy=self.algorithm.config.entropy > 0,
            distillation_use_topk=False,
            distillation_only=False,
        )

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add verl's metrics; a critic's are of the tokens that it is trained at, where verl's are of all."""
        ours = {name: value for name, value in metrics.items() if name.startswith("critic/")}
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics |= ours


def _responses(batch: KVBatchMeta, name: str) -> Tensor:
    """Fetch what an engine computed for whole rows; return it for their responses, nested."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name, "response_mask"])
    found: Tensor = response_from_nested(data[name], data["response_mask"])
    return found


def _put(batch: KVBatchMeta, fields: TensorDict) -> KVBatchMeta:
    """Send fields; return the batch that leads workers to them: one from before may list the fields that it had."""
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _reported(output: TensorDict, worker: str) -> dict[str, float]:
    """Name and average what a worker's updates reported."""
    found = rename_dict(output["metrics"], f"{worker}/")
    found[f"perf/mfu/{worker}"] = found.pop(f"{worker}/mfu")
    return dict(reduce_metrics(found))


class SyncTrainer(AlgorithmTrainer, PPOTrainerSync):
    """Rollout and training take turns on the same devices."""


class ColocateAsyncTrainer(AlgorithmTrainer, PPOTrainerColocateAsync):
    """They take turns on the same devices; a step trains on what was begun during the one before."""


class SeparateAsyncTrainer(AlgorithmTrainer, PPOTrainerSeparateAsync):
    """Rollout and training run at the same time, on devices of their own."""


TRAINERS: dict[str, type[PPOTrainer]] = {
    "sync": SyncTrainer,
    "colocate_async": ColocateAsyncTrainer,
    "separate_async": SeparateAsyncTrainer,
}
