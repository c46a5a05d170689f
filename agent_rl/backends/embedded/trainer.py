"""Trainer: one step is rollout, advantages, and an update; all randomness is a function of (seed, step)."""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.algorithms import Algorithm, Denominators, Experience, WeightedRows
from agent_rl.algorithms.loss import EXTREMES
from agent_rl.algorithms.objectives.value import critic_metrics
from agent_rl.backends.embedded.actor import Actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.critic import Critic
from agent_rl.backends.embedded.fine_tuning import checkpointed, enable_checkpointing
from agent_rl.backends.embedded.mini_batches import MiniBatch, mini_batches
from agent_rl.backends.embedded.optimizer import Optimizer, schedule
from agent_rl.backends.embedded.processes import Gradient, OneProcess
from agent_rl.backends.embedded.prompts import Prompt, micro_batches
from agent_rl.backends.embedded.rollouts import RolloutSampler, StepBatch, shuffled
from agent_rl.backends.embedded.row_scorer import RowScorer
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.group_sampling import Groups, episodes_of, require_hooks
from agent_rl.core.episode import Episode, Origin, group_episodes
from agent_rl.core.messages import Task
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.device import float64_device
from agent_rl.errors import ConfigError
from agent_rl.gym.mixture import members_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.moe.agreement import RoutingConfig
from agent_rl.moe.routes import replayed, routers
from agent_rl.rollout import Evaluation, summarise
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.runs.stored_groups import StoredGroups
from agent_rl.runs.token_records import Learned
from agent_rl.seeds import Stream, rng
from agent_rl.store.token_records import TokenRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; `metrics` has the field's names."""

    episodes: list[Episode]
    metrics: dict[str, float]
    records: list[TokenRecord]
    """What the update made of the sampled tokens; none if `token_records` is false."""


class Trainer:
    """Trains an actor on an environment or a mixture. `step` counts finished steps and is the cursor into the data."""

    def __init__(
        self,
        spec: EnvSpec,
        actor: Actor,
        config: TrainConfig,
        reference: PreTrainedModel | None = None,
        stored: StoredGroups | None = None,
    ) -> None:
        self.spec, self.actor, self.config, self.reference, self.stored = spec, actor, config, reference, stored
        self.algorithm = Algorithm(config.decided_algorithm.within(actor.engine.context_limit))
        for member in members_of(spec, config.env_args):
            require_hooks(member.spec, self.algorithm)
        has_critic, half = config.algorithm.critic.where != "none", config.precision.autocast == "float16"
        self._require_possible(has_critic, half)
        if config.gradient_checkpointing:
            enable_checkpointing(actor.model)
        self.optimizer = Optimizer(
            actor.model,
            config.optimizer,
            scale_loss=half,
            sampled_by=config.rollout.weights,
            updates=config.updates.most,
        )
        self.loss_device = float64_device(actor.model.device)
        """Where losses are computed."""
        self.critic = Critic(actor.model, self.algorithm, config.optimizer) if has_critic else None
        self.scorer = RowScorer(actor, config, self.algorithm, self.critic, reference)
        self.processes = OneProcess()
        self.rollouts = RolloutSampler(spec, actor, config, self.algorithm)
        self.ahead = deque[StepBatch]()
        """The batches of the steps to come that were sampled already, the next one's first."""
        self.learned: Learned | None = None
        """What the last update learned from; None if nothing was sampled."""
        self.step = 0

    def _require_possible(self, has_critic: bool, half: bool) -> None:
        """Refuse what can't be done with this model or on its device.

        Raises:
            ConfigError: with what can.
        """
        is_mixture = bool(routers(self.actor.model))
        if self.config.algorithm.routing != RoutingConfig() and not is_mixture:
            raise ConfigError("algorithm.routing is about a mixture of experts, and the model is dense")
        if self.algorithm.needs_reference and self.reference is None:
            name = self.config.algorithm.name
            raise ConfigError(f"{name} compares with the start of the run: give it as `reference`")
        if self.actor.model.device.type == "mps" and (is_mixture or has_critic or half):
            raise ConfigError(
                "device=mps has no float64, which mixtures of experts and critics need, and scales no losses: set "
                "device=cpu, or a dense model without a critic and without precision.autocast=float16"
            )

    def train_step(self) -> StepResult:
        """Sample a batch with the present weights, or take one that is waiting or stored; learn from it, advance."""
        if self.stored is not None:
            return self._stored_step(self.stored)
        sampled = self._next()
        episodes, sampling = sampled.episodes, sampled.sampling
        started = time.perf_counter()
        metrics = self.update(sampled.experience(self.algorithm), sampled.hot) | sampled.metrics
        done = time.perf_counter()
        records = self._records(sampled.batch)
        self.step += 1
        first = sampled.first_tries
        metrics |= rollout_metrics(first, self.config.judge.prices, tried_again=episodes[len(first) :]) | {
            "rollout/rounds": float(sampling.rounds),
            "rollout/batch_filled": len(sampling.selected) / sampling.target,
            "perf/rollout_s": sampled.seconds,
            "perf/update_s": done - started,
            "perf/sampled_tokens_per_s": sampled.tokens / sampled.seconds,
        }
        _log.debug("step %d: rollout %.2f s, update %.2f s", self.step, sampled.seconds, done - started)
        return StepResult(episodes, metrics, records)

    def _next(self) -> StepBatch:
        """Return this step's batch, after sampling those that are due with the present weights."""
        self.actor.engine.update_weights(self.step)
        self.processes.update_weights(self.step)
        while not self.ahead or (
            len(self.ahead) <= self.config.steps_ahead and self.step + len(self.ahead) < self.config.steps
        ):
            self.ahead.append(self.rollouts.sample(self.step + len(self.ahead)))
        self.actor.engine.release_weights()
        return self.ahead.popleft()

    def _stored_step(self, stored: StoredGroups) -> StepResult:
        """Learn from stored groups; nothing is sampled, so there is nothing to store."""
        started = time.perf_counter()
        episodes = stored.batch(self.config.seed, self.step, self.config.rollout.groups)
        if self.config.shuffle_rewards:
            episodes = shuffled(episodes, rng(Stream.SHUFFLED_REWARDS, self.config.seed, self.step))
        read = time.perf_counter()
        groups = group_episodes(episodes)
        self.processes.update_weights(self.step)
        self.actor.engine.release_weights()
        metrics = self.update(self.algorithm.experience(groups))
        metrics |= {"perf/read_s": read - started, "perf/update_s": time.perf_counter() - read}
        records = self._records(groups)
        self.step += 1
        _log.debug("step %d: read %.2f s, update %.2f s", self.step, read - started, metrics["perf/update_s"])
        return StepResult([], metrics, records)

    def _records(self, groups: Groups) -> list[TokenRecord]:
        """Return what the last update made of a batch's sampled tokens."""
        if self.learned is None or not self.config.token_records:
            return []
        return self.learned.records(episodes_of(groups), self.step, self.algorithm.config)

    def update(self, x: Experience, hot: Sequence[int] = ()) -> dict[str, float]:
        """Take the step's updates on what was experienced; none if there is nothing to learn from.

        `hot` are the groups that were sampled at another temperature than the step's.
        """
        self.learned = None
        metrics = {"train/samples": 0.0, "rollout/kept": float(x.kept.double().mean())}
        if not len(x.rows):
            return metrics
        scored, found = self.scorer.score(x.rows, x.groups[x.rows.episode], self.step, hot)
        x = replace(x, rows=scored.rows)
        metrics |= found | self.algorithm.diagnose(x, scored, self.step if self.stored is None else None)
        weighed, _, wanted = self.algorithm.compute_weights_in_place_order(x, scored)
        batch = weighed.select(torch.nonzero(wanted)[:, 0])
        self.learned = Learned(weighed, x.kept)
        metrics |= self.algorithm.advantage_metrics(x, batch)
        metrics["train/samples"] = float(len(batch))
        metrics["train/with_gradient"] = len(batch) / len(x.rows)
        if not len(batch):
            return metrics
        if batch.critic is not None:
            metrics |= critic_metrics(batch.critic.values, batch.critic.returns, batch.critic.valued)
        if self.algorithm.needs_reference_for_loss and scored.reference_logprobs is None:  # for these rows only
            batch = replace(batch, scored=self.scorer.compare(batch.scored, batch.group, self.step))
        parts = mini_batches(weighed, wanted, batch, self.config.updates, self.config.seed, self.step)
        metrics |= self._update_by(parts, torch.nonzero(wanted)[:, 0])
        if self.config.asynchrony.mode != "sync" and not self.algorithm.recomputes_old:  # else `diagnose` has said it
            metrics |= self.learned.gap_by_age(self.step)
        return metrics | {"train/tokens": float(batch.rows.loss_mask.sum())}

    def _update_by(self, parts: Iterable[MiniBatch], rows: Tensor) -> dict[str, float]:
        """Take an update on each mini-batch, until theta has left old too far; `rows` are the places of the batch's.

        A kill in between loses nothing but time: checkpoints are of whole steps, and a step is the same again.
        """
        taken, limit = list[dict[str, float]](), self.config.updates.target_kl
        scale = schedule(self.config.optimizer, self.step, self.config.steps)
        for part in parts:
            if taken:
                self.processes.update_weights(self.step)
            found = self._add_gradients(part, rows)
            if taken and limit is not None and found["train/old_kl"] > limit:
                self.optimizer.discard()
                if self.critic is not None:
                    self.critic.discard()
                break
            found["train/grad_norm"] = self.optimizer.step(scale)
            taken.append(found | (self.critic.step(scale) if self.critic is not None else {}))
        metrics = {name: sum(found[name] for found in taken) / len(taken) for name in taken[0]}
        metrics |= {f"train/{x}": of(found[f"train/{x}"] for found in taken) for x, of in EXTREMES.items()}
        if self.config.updates.most > 1:
            each = ("ratio", "clip_fraction", "old_kl", "grad_norm")
            metrics |= {f"update/{n}/{x}": found[f"train/{x}"] for n, found in enumerate(taken, 1) for x in each}
        if self.optimizer.scales_loss:
            metrics["train/loss_scale"] = self.optimizer.loss_scale
        return metrics | {"train/updates": float(len(taken)), "train/lr": self.optimizer.lr * scale}

    def _add_gradients(self, part: MiniBatch, rows: Tensor) -> dict[str, float]:
        """Add the gradients of a mini-batch, which is prepared first; return what the update reports."""
        prepared, of_objective = self._prepare(part.batch) if self.algorithm.prepares(part.batch) else (part.batch, {})
        sums = dict[str, float]()
        for cut, found, logprobs in self.processes.gradients(self.gradients, prepared, part.whole):
            if part.epoch == 0 and self.learned is not None:
                self.learned.scores.append((rows[part.rows[cut]], logprobs))
            for name, value in found.items():
                sums[name] = EXTREMES.get(name, operator.add)(sums[name], value) if name in sums else value
        tokens, whole = int(part.batch.rows.loss_mask.sum()), {"loss", *EXTREMES}
        return {f"train/{n}": x if n in whole else x / tokens for n, x in sums.items()} | of_objective

    def _prepare(self, batch: WeightedRows) -> tuple[WeightedRows, dict[str, float]]:
        """Score the whole batch under theta, and let the objective prepare it."""
        return self.algorithm.prepare(self.scorer.present(batch.scored, batch.group, self.step), batch)

    def gradients(self, batch: WeightedRows, whole: Denominators) -> Iterator[Gradient]:
        """Add the gradients of a batch, or of whole groups of one, with the prompts of as many as fit computed once.

        `whole` are the denominators of all of the batch. Yields what each micro-batch gave.
        """
        model, budget = self.actor.model, self.config.forward_tokens
        for cut, prompt in micro_batches(model, batch.rows, batch.group, self.config.precision, budget):
            yield Gradient(cut, *self._accumulate(batch.padded(cut, self.loss_device), whole, prompt))
        self.optimizer.gather()  # what went on through prompts after the last loss

    def _accumulate(
        self, batch: WeightedRows, whole: Denominators, prompt: Prompt | None = None
    ) -> tuple[dict[str, float], Tensor]:
        """Add the gradients of a micro-batch; return its sums to report, and the log-probabilities of its tokens."""
        config, model = self.config, self.actor.model
        replays = config.algorithm.routing.replay != "none"
        replaying = replayed(model, self.scorer.routes(batch.scored)) if replays else nullcontext()
        sparing = checkpointed(model) if config.gradient_checkpointing else nullcontext()
        with torch.set_grad_enabled(self.step >= config.algorithm.critic.warmup_steps), replaying, sparing:
            scores = score_tokens(
                model,
                batch.rows.token_ids.to(model.device),
                config.temperature_at(self.step),
                wanted=batch.rows.loss_mask.to(model.device),
                prompt=prompt,
                entropy_gradient=config.algorithm.entropy > 0,
                precision=config.precision,
            )
            logprobs, entropy = (x.to(batch.rows.token_ids.device) for x in (scores.logprobs, scores.entropy))
            terms = self.algorithm.loss(logprobs, entropy, batch.inputs, whole)
        loss = terms.loss
        if self.critic is not None and batch.critic is not None:
            loss = loss + self.critic.loss(scores.hidden, batch.rows.token_ids, batch.critic, whole)
        self.optimizer.backward(loss)
        return terms.sums | {"loss": float(terms.loss.detach())}, logprobs.detach()

    def evaluate(
        self, tasks: Sequence[Task], params: SamplingParams, split: str, sampling: str = ""
    ) -> tuple[Evaluation, list[Episode]]:
        """Run each task of a split once; the same weights give the same episodes. Their ids name the sampling."""
        self.actor.engine.update_weights(self.step)
        self.processes.update_weights(self.step)
        origin = Origin("eval", split, self.step, greedy=params.temperature == 0)
        jobs = [self.rollouts.job(origin, task, number, sampling) for number, task in enumerate(tasks)]
        episodes = self.rollouts.run(jobs, params)
        return summarise(episodes), episodes
