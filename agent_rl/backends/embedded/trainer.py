"""Trainer: one step is rollout, advantages, and an update; all randomness hangs on (seed, step)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from agent_rl.algorithms import Algorithm, Batch, Denominators, Experience
from agent_rl.algorithms.objectives.pairwise import PreparedBatch
from agent_rl.algorithms.objectives.value import critic_metrics
from agent_rl.backends.embedded.actor import Actor
from agent_rl.backends.embedded.batch_scores import score_batch
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.critic import Critic
from agent_rl.backends.embedded.optimizer import Optimizer, schedule
from agent_rl.backends.embedded.rollouts import RolloutSampler, StepBatch, shuffled
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.group_sampling import require_hooks
from agent_rl.core.episode import Episode, Origin, group_episodes
from agent_rl.core.messages import Task
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import EVALUATION_SEED, episode_seed
from agent_rl.moe.agreement import RoutingConfig, replayed_routes
from agent_rl.moe.balance import RouteLog
from agent_rl.moe.routes import routed, routers
from agent_rl.rollout import Evaluation, Job, run_jobs, summarise
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.runs.stored_groups import StoredGroups
from agent_rl.seeds import Stream, rng


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; `metrics` has the field's names."""

    episodes: list[Episode]
    metrics: dict[str, float]


class Trainer:
    """Trains a student on one environment. `step` counts finished steps and is the cursor into the data."""

    def __init__(
        self,
        spec: EnvSpec,
        actor: Actor,
        config: TrainConfig,
        reference: PreTrainedModel | None = None,
        stored: StoredGroups | None = None,
    ) -> None:
        self.spec, self.actor, self.config, self.reference, self.stored = spec, actor, config, reference, stored
        self.algorithm = Algorithm(config.algorithm)
        require_hooks(spec, self.algorithm)
        if config.algorithm.routing != RoutingConfig() and not routers(actor.model):
            raise ConfigError("algorithm.routing is about a mixture of experts, and the model is dense")
        if self.algorithm.needs_reference and reference is None:
            raise ConfigError(f"{config.algorithm.name} compares with the start of the run: give it as `reference`")
        half = config.precision.autocast == "float16"
        self.optimizer = Optimizer(actor.model, config.optimizer, scale_loss=half)
        wanted = config.algorithm.critic.where != "none"
        self.critic = Critic(actor.model, self.algorithm, config.optimizer) if wanted else None
        self.rollouts = RolloutSampler(spec, actor, config, self.algorithm)
        self.ahead = deque[StepBatch]()
        """The batches of the steps to come that were sampled already, the next one's first."""
        self.step = 0

    def train_step(self) -> StepResult:
        """Sample a batch with the present weights, or take one that is waiting or stored; learn from it, advance."""
        if self.stored is not None:
            return self._stored_step(self.stored)
        sampled = self._next()
        episodes, sampling = sampled.episodes, sampled.sampling
        started = time.perf_counter()
        metrics = self.update(sampled.experience(self.algorithm)) | sampled.metrics
        done = time.perf_counter()
        self.step += 1
        metrics |= rollout_metrics(episodes) | {
            "rollout/rounds": float(sampling.rounds),
            "rollout/batch_filled": len(sampling.selected) / sampling.target,
            "perf/rollout_s": sampled.seconds,
            "perf/update_s": done - started,
            "perf/sampled_tokens_per_s": sampled.tokens / sampled.seconds,
        }
        return StepResult(episodes, metrics)

    def _next(self) -> StepBatch:
        """Return this step's batch, after sampling those that are due with the present weights."""
        self.actor.engine.update_weights(self.step)
        while not self.ahead or (
            len(self.ahead) <= self.config.steps_ahead and self.step + len(self.ahead) < self.config.steps
        ):
            self.ahead.append(self.rollouts.sample(self.step + len(self.ahead)))
        return self.ahead.popleft()

    def _stored_step(self, stored: StoredGroups) -> StepResult:
        """Learn from stored groups; nothing is sampled, so there is nothing to store."""
        started = time.perf_counter()
        episodes = stored.batch(self.config.seed, self.step, self.config.rollout.groups)
        if self.config.shuffle_rewards:
            episodes = shuffled(episodes, rng(Stream.SHUFFLED_REWARDS, self.config.seed, self.step))
        read = time.perf_counter()
        metrics = self.update(self.algorithm.experience(group_episodes(episodes)))
        self.step += 1
        metrics |= {"perf/read_s": read - started, "perf/update_s": time.perf_counter() - read}
        return StepResult([], metrics)

    def update(self, x: Experience) -> dict[str, float]:
        """Take `updates_per_batch` gradient steps on what was experienced; none if there is nothing to learn from."""
        config = self.config
        metrics = {"train/samples": 0.0, "rollout/kept": float(x.kept.double().mean())}
        if x.batch is None:
            return metrics
        x, measured = self._scored(x)
        metrics |= measured
        metrics |= self.algorithm.diagnose(x, self.step if self.stored is None else None)
        batch, whole = self.algorithm.compute_weights(x)
        metrics |= self.algorithm.advantage_metrics(x, batch)
        metrics["train/samples"] = float(len(batch))
        if not len(batch):
            return metrics
        metrics |= critic_metrics(batch.values, batch.returns, batch.valued)
        if self.reference is not None and config.algorithm.kl.where != "reward":  # of these rows only: it takes time
            batch = self._compared(batch)
        scale = schedule(config.optimizer, self.step, config.steps)
        for _ in range(config.updates_per_batch):
            prepared, sums = self._prepared(batch), dict[str, float]()
            for micro_batch in prepared.batch.cut(config.micro_batch_tokens):
                for name, value in self._accumulate(micro_batch, whole).items():
                    sums[name] = sums.get(name, 0.0) + value
            norm = self.optimizer.step(scale)
            if self.critic is not None:
                metrics |= self.critic.step(scale)
        tokens = int(batch.loss_mask.sum())
        metrics |= {f"train/{name}": value / tokens for name, value in sums.items() if name != "loss"}
        if self.optimizer.scales_loss:
            metrics["train/loss_scale"] = self.optimizer.loss_scale
        return metrics | {
            "train/loss": sums["loss"],
            "train/grad_norm": norm,
            "train/lr": config.optimizer.lr * scale,
            "train/tokens": float(tokens),
            **prepared.metrics,
        }

    def _prepared(self, batch: Batch) -> PreparedBatch:
        """Let the objective see the whole batch under theta, if it wants to."""
        if not self.algorithm.needs_scores_before_update:
            return PreparedBatch(batch, {})
        routes = replayed_routes(batch, self.config.algorithm.routing.replay)
        (logprobs,) = score_batch(self.actor.model, batch, self.config, "logprobs", given=routes)
        return self.algorithm.prepare(logprobs, batch)

    def _accumulate(self, batch: Batch, whole: Denominators) -> dict[str, float]:
        config, model = self.config, self.actor.model
        routes = replayed_routes(batch, config.algorithm.routing.replay)
        with torch.set_grad_enabled(self.step >= config.algorithm.critic.warmup_steps), routed(model, routes):
            scores = score_tokens(
                model,
                batch.token_ids,
                config.rollout.temperature,
                entropy_gradient=config.algorithm.entropy > 0,
                precision=config.precision,
            )
            terms = self.algorithm.loss(scores.logprobs, scores.entropy, batch, whole)
        value_loss = self.critic.loss(scores.hidden, batch, whole) if self.critic is not None else 0.0
        self.optimizer.backward(terms.loss + value_loss)
        return terms.sums | {"loss": float(terms.loss.detach())}

    def _scored(self, x: Experience) -> tuple[Experience, dict[str, float]]:
        """Fill in what was not known when the tokens were sampled: what other policies say about them."""
        batch, log = x.rows, RouteLog(x.rows.lengths, x.rows.token_ids.shape[1])
        given = replayed_routes(batch, "R3") if self.config.algorithm.routing.replay == "R3" else None
        if self.config.algorithm.proximal == "recompute":
            names = ("logprobs", "sum_pi_squared")
            logprobs, squares = score_batch(self.actor.model, batch, self.config, *names, given=given, log=log)
            batch = replace(batch, old_logprobs=logprobs, sum_pi_squared=squares, old_experts=log.own)
        if self.critic is not None:
            budget, precision = self.config.micro_batch_tokens, self.config.precision
            values = self.critic.values(self.actor.model, batch, budget, precision, given)
            batch = replace(batch, values=values)
        x = replace(x, batch=self._compared(batch) if self.config.algorithm.kl.where == "reward" else batch)
        return x, log.metrics()

    def _compared(self, batch: Batch) -> Batch:
        """Fill in what the reference says about the tokens."""
        assert self.reference is not None
        (logprobs,) = score_batch(self.reference, batch, self.config, "logprobs")
        return replace(batch, reference_logprobs=logprobs)

    def evaluate(
        self,
        tasks: Sequence[Task],
        params: SamplingParams,
        split: str,
        tag: str,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> tuple[Evaluation, list[Episode]]:
        """Run each task of a split once; the same weights give the same episodes, whose ids begin with `tag`."""
        self.actor.engine.update_weights(self.step)
        origin = Origin("eval", split, self.step, greedy=params.temperature == 0)
        jobs = [
            Job(
                self.spec,
                task,
                episode_seed(EVALUATION_SEED, task, 0),
                tag,
                env_args=self.config.env_args,
                id=f"{tag}-{i:04d}",
                origin=origin,
            )
            for i, task in enumerate(tasks)
        ]
        policy = self.rollouts.policy(params)
        episodes = asyncio.run(run_jobs(jobs, policy, concurrency=self.actor.engine.slots, on_episode=on_episode))
        return summarise(episodes), episodes
