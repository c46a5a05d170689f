"""The driver's side: verl's trainers, with advantages, corrections and denominators from `agent_rl.algorithms`."""

from __future__ import annotations

import logging
from pathlib import Path

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.tracking import Tracking
from verl.workers.rollout.llm_server import LLMServerClient

from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.exchange import receive, weigh
from agent_rl.backends.verl.loss import loss_function
from agent_rl.backends.verl.resume import METRICS, MetricsFile, note
from agent_rl.backends.verl.staleness import check_staleness
from agent_rl.store.episodes import EpisodeWriter


class AlgorithmTrainer(PPOTrainer):
    """What is changed in verl's trainers; mixed in front of each of them."""

    algorithm: Algorithm
    store: EpisodeWriter

    def _setup(self) -> None:
        super()._setup()
        settings = self.config.data.agent_rl
        self.algorithm = Algorithm(AlgorithmConfig.model_validate_json(settings.algorithm))
        self.store = EpisodeWriter(settings.episodes)
        self.actor_rollout_wg.set_loss_fn(loss_function(self.algorithm.config))

    @property
    def logger(self) -> Tracking:
        """The loggers of verl, and ours."""
        return self._logger

    @logger.setter
    def logger(self, loggers: Tracking) -> None:
        loggers.logger["agent_rl"] = MetricsFile(self.store.path.with_name(METRICS))
        self._logger = loggers

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        # verl saves the queue before it clears the rows of the step
        items = (tq.kv_list("train") or {}).get("train", {})
        groups = {key for key, tag in items.items() if tag.get("is_prompt", False)}
        if trained := [key for key in items if key not in groups and key.split("_", 1)[0] not in groups]:
            tq.kv_clear(keys=trained, partition_id="train")

    def _save_checkpoint(self) -> None:
        note(Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}", self.store)
        super()._save_checkpoint()

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
        limit = self.config.data.agent_rl.max_staleness
        metrics |= found | check_staleness(received.episodes, self.global_steps - 1, limit)
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


class SyncTrainer(AlgorithmTrainer, PPOTrainerSync):
    """Rollout and training take turns on the same devices."""


class ColocateAsyncTrainer(AlgorithmTrainer, PPOTrainerColocateAsync):
    """They take turns on the same devices; a step trains on what was begun during the one before."""

    def get_llm_client(self) -> LLMServerClient:
        """Return a client that hands on aborted requests: `Continued` goes on with them."""
        return self.llm_server_manager.get_client()


class SeparateAsyncTrainer(AlgorithmTrainer, PPOTrainerSeparateAsync):
    """Rollout and training run at the same time, on devices of their own."""

    def _setup(self) -> None:
        # verl 0.9.1 passes print's `flush` to a logger there, which raises where INFO is logged
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()

    def get_llm_client(self) -> LLMServerClient:
        """Return a client that hands on aborted requests: `Continued` goes on with them."""
        return self.standalone_server_manager.get_client()


TRAINERS: dict[str, type[PPOTrainer]] = {
    "sync": SyncTrainer,
    "colocate_async": ColocateAsyncTrainer,
    "separate_async": SeparateAsyncTrainer,
}
