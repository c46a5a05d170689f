"""The driver's side: verl's trainers, with advantages, corrections and denominators from `agent_rl.algorithms`."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tracking import Tracking
from verl.workers.rollout.llm_server import LLMServerClient

from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.config.names import IN_WARNINGS
from agent_rl.backends.verl.driver.canary import (
    Canary,
    canary_ids,
)
from agent_rl.backends.verl.driver.checkpoints import finish_model, record_evaluation, remove_old
from agent_rl.backends.verl.driver.exchange import COMPUTED, SAMPLES, compute_weights, score_metrics
from agent_rl.backends.verl.driver.metrics_check import require_metrics
from agent_rl.backends.verl.driver.received import receive
from agent_rl.backends.verl.driver.replay_buffer import EpisodeReplayBuffer
from agent_rl.backends.verl.driver.resume import MetricsLogger, open_metrics, record_position
from agent_rl.backends.verl.driver.staleness import check_staleness
from agent_rl.backends.verl.driver.updates import UpdatingTrainer, put, responses_of
from agent_rl.backends.verl.driver.watchdog import server_managers
from agent_rl.backends.verl.worker.engine import (
    DetachedPolicyWorker,
    PolicyWorker,
    RoutedDetachedWorker,
    RoutedWorker,
    SteppedTrainingWorker,
)
from agent_rl.backends.verl.worker.loss import loss_function, value_loss_function
from agent_rl.backends.verl.worker.routes import (
    EQUAL,
    ROLLOUT,
    SHARED,
    VERL_REPLAY_STRATEGIES,
    replay_routes,
    route_fields,
)
from agent_rl.gym.mixture import environment_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.runs.diagnosis import Diagnosis
from agent_rl.runs.metrics import MetricsFile
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.token_records import TokenRecordWriter


class AlgorithmTrainer(UpdatingTrainer):
    """What is changed in verl's trainers; mixed in front of each of them."""

    env: EnvSpec
    store: EpisodeWriter
    records: TokenRecordWriter | None = None
    metrics: MetricsFile
    replay_buffer: Any
    policy_workers: tuple[type, type] = (PolicyWorker, RoutedWorker)
    """Without routes, and with them."""
    canary: Canary | None = None
    checked: bool = False
    """Whether a step has reported all that the algorithm asks for."""

    # Set-up, in the order in which verl calls it

    def _setup(self) -> None:
        settings, samples = self.config.data.agent_rl, self.config.actor_rollout_ref.rollout.n
        self.env = environment_of(cast(dict[str, Any], OmegaConf.to_container(settings, resolve=True)))  # imports, too
        self.algorithm = Algorithm(AlgorithmConfig.model_validate_json(settings.algorithm))
        self.routes = route_fields(self.algorithm.config.routing, self.config)
        self.store = EpisodeWriter(settings.episodes, experts=settings.store_experts)
        self.records = TokenRecordWriter(settings.episodes) if settings.token_records else None
        self.metrics = open_metrics(folder := self.store.path.parent, settings.report_to)
        steps = self.config.trainer.total_training_steps
        self.diagnosis = Diagnosis(
            self.algorithm.config, samples, self.env.cls, folder, print, steps=steps, names=IN_WARNINGS
        )
        super()._setup()
        self.actor_rollout_wg.set_loss_fn(loss_function(self.algorithm.config, settings.imports))
        if self.use_critic:
            self.critic_wg.set_loss_fn(value_loss_function(self.algorithm.config, settings.imports))
        self.replay_buffer = EpisodeReplayBuffer(
            self.replay_buffer,
            self.algorithm,
            self.store,
            self.metrics,
            self._submit_batch_to_rollout,
            env=self.env,
            samples=samples,
            seed=settings.seed,
        )
        self.canary = self._make_canary(settings.max_rollout_gap)

    def _make_canary(self, limit: float) -> Canary | None:
        """Return the canary; none for an engine of verl's own that scores nothing without a rollout's routes."""
        model = self.config.actor_rollout_ref
        if model.actor.strategy in VERL_REPLAY_STRATEGIES and self.algorithm.config.routing.replay != "none":
            return None
        servers = [handle for manager in server_managers(self) for handle in manager.server_handles]
        return Canary(canary_ids(self.tokenizer, model.rollout.max_model_len), self.actor_rollout_wg, servers, limit)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        policy = {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef} & self.role_worker_mapping.keys()
        self.role_worker_mapping |= dict.fromkeys(policy, ray.remote(self.policy_workers[bool(self.routes)]))
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(SteppedTrainingWorker)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        # verl saves the queue before it clears the rows of the step
        items = (tq.kv_list("train") or {}).get("train", {})
        groups = {key for key, tag in items.items() if tag.get("is_prompt", False)}
        if trained := [key for key in items if key not in groups and key.split("_", 1)[0] not in groups]:
            tq.kv_clear(keys=trained, partition_id="train")

    @property
    def logger(self) -> Tracking:
        """The loggers of verl, and ours."""
        return self._logger

    @logger.setter
    def logger(self, loggers: Tracking) -> None:
        check = partial(self.diagnosis.require_scores, "the run can go on")  # the driver says how
        loggers.logger["agent_rl"] = MetricsLogger(self.metrics, self.diagnosis.observe, check)
        self._logger = loggers

    # A step, in verl's order

    def on_init_end(self) -> None:
        """Send the first weights, and check that the servers have them."""
        with self._watched_sync():
            super().on_init_end()

    def on_step_end(self) -> None:
        """Send the updated weights, and check that the servers have them."""
        with self._watched_sync():
            super().on_step_end()

    def _watched_sync(self) -> AbstractContextManager[None]:
        self._synced = dict[str, float]()
        return nullcontext() if self.canary is None else self.canary.watch_sync(self._synced)

    def _consume_sync_metrics(self) -> dict[str, float]:
        return dict(super()._consume_sync_metrics()) | self._synced

    def step(self, metrics: dict[str, float], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Take a step; the first learning step must report every feature of the algorithm.

        Raises:
            ConfigError: if a feature of the algorithm left no trace in the metrics.
        """
        batch = super().step(metrics, timing_raw)
        learned = metrics.get(SAMPLES, 1) and self.config.trainer.critic_warmup <= self.global_steps
        if learned and not self.checked:
            require_metrics(self.algorithm.config, metrics)
            self.checked = True
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Score the batch under old.

        With the rollout's routes if they are replayed. What its own routes say, and how sure it was, is added to the
        queue if asked for.
        """
        replay = ROLLOUT if self.algorithm.config.routing.replay == "R3" else ""
        wanted = {"calculate_sum_pi_squared": True} if self.algorithm.needs_distributions else {}
        batch.extra_info.update(wanted)
        record = tuple(name for name in self.routes if name != ROLLOUT)
        with replay_routes(batch.extra_info, replay, record):
            batch = super()._compute_old_log_prob(batch, metrics)  # another, which asks the reference for none
        if not wanted:
            return batch
        return put(batch, TensorDict({"sum_pi_squared": responses_of(batch, "sum_pi_squared")}, len(batch)))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Store the batch's episodes, weigh it, and send every row what the loss reads.

        Raises:
            RuntimeError: if verl changed a token, or one is older than the run allows.
        """
        names = ["prompts", "responses", "response_mask", "extra_fields", *COMPUTED.values()]
        names += [name for name in (EQUAL, SHARED) if name in self.routes]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        received = self.replay_buffer.add_to(receive(batch.keys, data.pop("extra_fields").tolist(), padding))
        self.diagnosis.episodes = episodes = received.episodes
        for episode in episodes:
            self.store.write(episode)
        self.store.flush()
        version, run = self.global_steps - 1, self.config.data.agent_rl
        check_staleness(episodes, version, run.max_staleness)
        self.weighed = compute_weights(self.algorithm, received, data, version, self.mini_batch_of)
        if self.records is not None:
            self.records.write(self.weighed.records(received, version, self.algorithm.config))
        metrics |= self.weighed.metrics | rollout_metrics(episodes, run.judge.get("prices")) | score_metrics(episodes)
        return put(batch, self.weighed.sent)

    def _save_checkpoint(self) -> None:
        record_position(self._checkpoint, self.store)
        super()._save_checkpoint()
        run = self.config.data.agent_rl
        finish_model(self._checkpoint, run.renderer)
        remove_old(self._checkpoint.parent, run.keep_checkpoints)

    @property
    def _checkpoint(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add verl's metrics, but not where ours say it of the scored episodes and trained tokens only."""
        ours = {name: value for name, value in metrics.items() if name.startswith("critic/")}
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics |= ours

    def _val_metrics_update(
        self, sources: Any, uids: Any, infos: dict[str, list[Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """Leave episodes without a score out of the evaluation's reward, which verl counts as 0.

        The success of all episodes is written into the checkpoint of these weights, if there is one.
        """
        if known := [success for success in infos.get("success", ()) if success is not None]:
            record_evaluation(self._checkpoint, sum(known) / len(known))
        pairs = zip(infos["reward"], infos["scored"], strict=True)
        infos["reward"] = [reward if scored else None for reward, scored in pairs]
        return dict(super()._val_metrics_update(sources, uids, infos, *args, **kwargs))


class SyncTrainer(AlgorithmTrainer, PPOTrainerSync):
    """Rollout and training take turns on the same devices."""

    on_policy = True


class ColocateAsyncTrainer(AlgorithmTrainer, PPOTrainerColocateAsync):
    """They take turns on the same devices; a step trains on what was begun during the one before."""

    def get_llm_client(self) -> LLMServerClient:
        """Return a client that passes on aborted requests: `ResumingEngine` continues them."""
        return self.llm_server_manager.get_client()


class SeparateAsyncTrainer(AlgorithmTrainer, PPOTrainerSeparateAsync):
    """Rollout and training run at the same time, on devices of their own."""

    policy_workers = (DetachedPolicyWorker, RoutedDetachedWorker)

    def _setup(self) -> None:
        # verl 0.9.1 passes print's `flush` to a logger there, which raises where INFO is logged
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()

    def get_llm_client(self) -> LLMServerClient:
        """Return a client that passes on aborted requests: `ResumingEngine` continues them."""
        return self.standalone_server_manager.get_client()


TRAINERS: dict[str, type[PPOTrainer]] = {
    "sync": SyncTrainer,
    "colocate_async": ColocateAsyncTrainer,
    "separate_async": SeparateAsyncTrainer,
}
