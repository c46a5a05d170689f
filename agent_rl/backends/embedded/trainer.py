"""Trainer: one step is rollout, advantages, and an update; all randomness hangs on (seed, step)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.algorithms import Algorithm, Batch, Denominators, Experience
from agent_rl.algorithms.filters import Refill, next_round, offer
from agent_rl.algorithms.routing import RoutingConfig, replayed_routes
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.optimizer import Optimizer, schedule
from agent_rl.backends.embedded.routing import RouteLog, routed, routers
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.student import Student
from agent_rl.errors import ConfigError
from agent_rl.policy.sampling import SamplingParams
from agent_rl.registry import EnvSpec
from agent_rl.rollout import Evaluation, Job, run_jobs, summarise
from agent_rl.tasks import TaskStream, episode_seed, task_key
from agent_rl.types import Episode, Reward, Task

RL_START = 2**24
"""Where training's tasks begin in the stream, behind those of the demonstrations."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; `metrics` has the field's names."""

    episodes: list[Episode]
    evaluation: Evaluation
    metrics: dict[str, float]


class Trainer:
    """Trains a student on one environment. `step` counts finished steps and is the cursor into the data."""

    def __init__(
        self, spec: EnvSpec, student: Student, config: TrainConfig, reference: PreTrainedModel | None = None
    ) -> None:
        self.spec, self.student, self.config, self.reference = spec, student, config, reference
        self.algorithm = Algorithm(config.algorithm)
        if config.algorithm.routing != RoutingConfig() and not routers(student.model):
            raise ConfigError("algorithm.routing is about a mixture of experts, and the model is dense")
        self.optimizer = Optimizer(student.model, config.optimizer)
        self.tasks = TaskStream(spec.tasks, config.split, config.seed)
        self.step = 0

    def train_step(self) -> StepResult:
        """Sample a batch with the present weights, learn from it, advance."""
        started = time.perf_counter()
        engine = self.student.engine
        before = engine.tokens
        engine.update_weights(self.step)
        episodes, batch, state = self._sample()
        sampled = time.perf_counter()
        metrics = self.update(
            self.algorithm.experience(batch, self._greedy(state) if self.algorithm.needs_greedy else ())
        )
        done = time.perf_counter()
        self.step += 1
        evaluation = summarise(episodes)
        metrics |= {
            "rollout/success": evaluation.success.value,
            "rollout/reward": evaluation.reward,
            "rollout/turns": evaluation.turns,
            "rollout/tool_calls": evaluation.tool_calls,
            "rollout/tool_errors": evaluation.tool_errors,
            "rollout/failed": float(evaluation.failed),
            "rollout/rounds": float(state.rounds),
            "rollout/batch_filled": len(state.taken) / state.target,
            "rollout/truncated": float(np.mean([e.stop_reason != "done" for e in episodes])),
            "perf/rollout_s": sampled - started,
            "perf/update_s": done - sampled,
            "perf/sampled_tokens_per_s": (engine.tokens - before) / (sampled - started),
        }
        return StepResult(episodes, evaluation, metrics)

    def _sample(self) -> tuple[list[Episode], list[Episode], Refill]:
        """Sample groups until the batch is full: everything sampled, the batch, and how the batch came about."""
        config, engine, size = self.config, self.student.engine, self.config.rollout.samples
        policy = self.student.policy(config.rollout.params)
        refill, episodes = config.algorithm.refill, list[Episode]()
        state = refill.start(config.rollout.groups)
        while groups := next_round(state):
            jobs = self._jobs(range(state.offered, state.offered + groups))
            new = asyncio.run(run_jobs(jobs, policy, concurrency=engine.slots))
            if config.shuffle_rewards:
                new = shuffled(new, np.random.default_rng([3, config.seed, self.step, state.offered]))
            kept = self.algorithm.experience(new).kept.view(groups, size).any(1)
            state = offer(state, kept.tolist() if refill.max_rounds > 1 else [True] * groups)
            episodes += new
        return episodes, [e for g in state.taken for e in episodes[g * size : (g + 1) * size]], state

    def _greedy(self, state: Refill) -> list[Episode]:
        """Run each group of the batch once more, greedily: a baseline, neither stored nor trained on."""
        jobs = [self._jobs(range(group, group + 1))[0] for group in state.taken]
        policy = self.student.policy(replace(self.config.rollout.params, temperature=0.0))
        return asyncio.run(run_jobs(jobs, policy, concurrency=self.student.engine.slots))

    def _jobs(self, groups: range) -> list[Job]:
        """The jobs of some of the step's groups; ids tell a resumed run what it already wrote."""
        config, jobs = self.config, []
        stride = int(config.rollout.groups * config.algorithm.refill.most)
        for group in groups:
            task = self.tasks.at(RL_START + self.step * stride + group)
            name = f"train-{self.step:05d}-{group:03d}"
            # a finite split meets a task again in a later step; the step keeps its episodes from repeating
            round_seed = config.seed * 1_000_003 + self.step
            for sample in range(config.rollout.samples):
                seed = episode_seed(round_seed, task, sample)
                jobs.append(Job(self.spec, task, seed, name, env_args=config.env_args, id=f"{name}-{sample:02d}"))
        return jobs

    def update(self, x: Experience) -> dict[str, float]:
        """Take `updates_per_batch` gradient steps on what was experienced; none if there is nothing to learn from."""
        config = self.config
        metrics = {"train/samples": 0.0, "rollout/kept": float(x.kept.double().mean())}
        if x.batch is None:
            return metrics
        x, measured = self._scored(x)
        metrics |= measured
        if config.algorithm.proximal == "recompute":
            metrics |= self.algorithm.diagnose(x)
        batch, whole = self.algorithm.weigh(x)
        metrics["train/samples"] = float(len(batch))
        if not len(batch):
            return metrics
        scale = schedule(config.optimizer, self.step, config.steps)
        micro_batches = batch.cut(config.micro_batch_tokens)
        for _ in range(config.updates_per_batch):
            sums: dict[str, float] = {}
            for micro_batch in micro_batches:
                for name, value in self._accumulate(micro_batch, whole).items():
                    sums[name] = sums.get(name, 0.0) + value
            norm = self.optimizer.step(scale)
        tokens = int(batch.loss_mask.sum())
        metrics |= {f"train/{name}": value / tokens for name, value in sums.items() if name != "loss"}
        return metrics | {
            "train/loss": sums["loss"],
            "train/grad_norm": norm,
            "train/lr": config.optimizer.lr * scale,
            "train/tokens": float(tokens),
        }

    def _accumulate(self, batch: Batch, whole: Denominators) -> dict[str, float]:
        config, model = self.config, self.student.model
        with routed(model, replayed_routes(batch, config.algorithm.routing.replay)):
            scores = score_tokens(
                model, batch.token_ids, config.rollout.temperature, entropy_gradient=config.algorithm.entropy > 0
            )
        terms = self.algorithm.loss(scores.logprobs, scores.entropy, batch, whole)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        return terms.sums | {"loss": float(terms.loss.detach())}

    def _scored(self, x: Experience) -> tuple[Experience, dict[str, float]]:
        """Fill in what was not known when the tokens were sampled: what other policies say about them."""
        batch, log = x.rows, RouteLog(x.rows.lengths, x.rows.token_ids.shape[1])
        if self.config.algorithm.proximal == "recompute":
            given = replayed_routes(batch, "R3") if self.config.algorithm.routing.replay == "R3" else None
            logprobs, squares = self._score(
                self.student.model, batch, "logprobs", "sum_pi_squared", given=given, log=log
            )
            batch = replace(batch, old_logprobs=logprobs, sum_pi_squared=squares, old_experts=log.own)
        if self.reference is not None:
            (logprobs,) = self._score(self.reference, batch, "logprobs")
            batch = replace(batch, reference_logprobs=logprobs)
        return replace(x, batch=batch), log.metrics()

    @torch.no_grad()
    def _score(
        self,
        model: PreTrainedModel,
        batch: Batch,
        *names: str,
        given: Tensor | None = None,
        log: RouteLog | None = None,
    ) -> list[Tensor]:
        """Return some of a model's scores of the whole batch, each float32 `[B, T]`; 0 outside the mask.

        It takes the routes that are given, `[B, T, layers, top_k]`, and writes into the log those it would have taken.
        """
        whole = [torch.zeros_like(batch.rollout_logprobs) for _ in names]
        for rows in batch.cut_rows(self.config.micro_batch_tokens):
            part = batch.rows(rows)
            with routed(model, None if given is None else given[rows, : part.token_ids.shape[1]]) as routes:
                scores = score_tokens(model, part.token_ids, self.config.rollout.temperature)
            if log is not None:
                log.add(rows, routes)
            for out, name in zip(whole, names, strict=True):
                values = getattr(scores, name)
                out[rows, : values.shape[1]] = torch.where(part.loss_mask, values, values.new_zeros(()))
        return whole

    def evaluate(
        self,
        tasks: Sequence[Task],
        params: SamplingParams,
        tag: str,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> tuple[Evaluation, list[Episode]]:
        """Run each task once; the same tag and weights give the same episodes."""
        self.student.engine.update_weights(self.step)
        jobs = [
            Job(self.spec, t, episode_seed(2**31, t, 0), tag, env_args=self.config.env_args, id=f"{tag}-{i:04d}")
            for i, t in enumerate(tasks)
        ]
        policy = self.student.policy(params)
        episodes = asyncio.run(run_jobs(jobs, policy, concurrency=self.student.engine.slots, on_episode=on_episode))
        return summarise(episodes), episodes


def distinct_tasks(spec: EnvSpec, split: str, n: int) -> list[Task]:
    """Return the first `n` different tasks of a split; fewer if it doesn't seem to have as many."""
    size = spec.tasks.size(split)
    found: dict[str, Task] = {}
    for index in range(size if size is not None else 20 * n):
        task = spec.tasks.get(split, index)
        found.setdefault(task_key(task), task)
        if len(found) == n:
            break
    return list(found.values())


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
