"""The driver's side: verl's trainers, with advantages, corrections and denominators from `agent_rl.algorithms`."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.exchange import receive, weigh
from agent_rl.backends.verl.loss import loss_function
from agent_rl.backends.verl.recorder import Recorder
from agent_rl.store.episodes import EpisodeWriter


class AlgorithmTrainer(PPOTrainer):
    """What is changed in verl's trainers; mixed in front of each of them."""

    algorithm: Algorithm
    store: EpisodeWriter
    replay_buffer: Any

    def _setup(self) -> None:
        super()._setup()
        settings = self.config.data.agent_rl
        self.algorithm = Algorithm(AlgorithmConfig.model_validate_json(settings.algorithm))
        self.store = EpisodeWriter(settings.episodes)
        self.actor_rollout_wg.set_loss_fn(loss_function(self.algorithm.config))
        self.replay_buffer = Recorder(self.replay_buffer, self.store, _extra_fields)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Weigh the batch, and send every row what the loss reads."""
        names = ["prompts", "responses", "response_mask", "old_log_probs", "ref_log_prob", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        received = receive(batch.keys, data.pop("extra_fields").tolist(), padding)
        for episode in received.episodes:
            self.store.write(episode)
        self.store.flush()
        sent, found = weigh(self.algorithm, received, data)
        metrics |= found
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=sent)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Take `ppo_epochs` updates on the whole batch: its denominators are those of the whole."""
        actor = self.config.actor_rollout_ref.actor
        batch.extra_info.update(
            calculate_entropy=self.algorithm.config.entropy > 0,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(batch),
            mini_batch_size=len(batch),
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        output = rename_dict(self.actor_rollout_wg.update_actor(batch)["metrics"], "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        metrics |= reduce_metrics(output)
        return batch


def _extra_fields(batch: KVBatchMeta) -> list[dict[str, Any]]:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    found: list[dict[str, Any]] = data.pop("extra_fields").tolist()
    return found


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
