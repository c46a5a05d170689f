"""What a step's rows score under old, the critic and the reference, before the step's updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.algorithms import Algorithm, Rows, ScoredRows
from agent_rl.backends.embedded.actor import Actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.critic import Critic
from agent_rl.backends.embedded.scoring import score_rows
from agent_rl.engines.embedded.adapters import without_adapters
from agent_rl.errors import ConfigError
from agent_rl.moe.agreement import replayed_routes
from agent_rl.moe.balance import RouteLog
from agent_rl.moe.routes import routers


class RowScorer:
    """Scores rows by all models that a run's advantages and losses compare; `step` is finished steps, from 0."""

    def __init__(
        self,
        actor: Actor,
        config: TrainConfig,
        algorithm: Algorithm,
        critic: Critic | None,
        reference: PreTrainedModel | None,
    ) -> None:
        self.actor, self.config, self.algorithm = actor, config, algorithm
        self.critic, self.reference = critic, reference
        self.replay = config.algorithm.routing.replay

    def score(
        self, rows: Rows, group: Tensor, step: int, hot: Sequence[int] = ()
    ) -> tuple[ScoredRows, dict[str, float]]:
        """Score the rows by all models that the advantages need; also return metrics of their routes.

        `hot` are the groups that were sampled at another temperature than the step's: their rows are as if at that.
        """
        metrics, config = dict[str, float](), self.config
        given = replayed_routes("R3", rows.routed_experts, None) if self.replay == "R3" else None
        bounded = config.episodes is not None and config.updates.target_kl is not None  # mu is any policy there
        started = time.perf_counter()
        rows = self._cooled(rows, group, step, hot, given) if hot else rows
        scored = ScoredRows(rows, old_logprobs=rows.rollout_logprobs)
        if self.algorithm.recomputes_old or bounded:
            names = ("logprobs", *(("sum_pi_squared",) if self.algorithm.needs_distributions else ()))
            log = RouteLog(len(rows.token_ids)) if routers(self.actor.model) else None
            old, *squares = self._scores(self.actor.model, rows, group, step, *names, given=given, log=log)
            scored = replace(scored, old_logprobs=old, sum_pi_squared=squares[0] if squares else None)
            if log is not None:
                scored, metrics = replace(scored, old_experts=log.own), log.metrics()
        if hot or scored.old_logprobs is not rows.rollout_logprobs:
            metrics["perf/old_s"] = time.perf_counter() - started
        if self.critic is not None:
            values = self.critic.values(self.actor.model, rows, config.forward_tokens, config.precision, given)
            scored = replace(scored, values=values)
        if self.algorithm.needs_reference_for_advantages:
            scored = self.compare(scored, group, step)
        return scored, metrics

    def compare(self, scored: ScoredRows, group: Tensor, step: int) -> ScoredRows:
        """Score rows under the reference."""
        if self.reference is None:
            raise ConfigError(f"{self.config.algorithm.name} compares with the start of the run: give a `reference`")
        with without_adapters(self.reference):
            (logprobs,) = self._scores(self.reference, scored.rows, group, step, "logprobs")
        return replace(scored, reference_logprobs=logprobs)

    def present(self, scored: ScoredRows, group: Tensor, step: int) -> Tensor:
        """Return the log-probabilities under the policy as it is, by the routes that an update takes."""
        given = self.routes(scored) if self.replay != "none" else None
        (logprobs,) = self._scores(self.actor.model, scored.rows, group, step, "logprobs", given=given)
        return logprobs

    def routes(self, scored: ScoredRows) -> Tensor:
        """Return the routes that an update takes."""
        return replayed_routes(self.replay, scored.rows.routed_experts, scored.old_experts)

    def _cooled(self, rows: Rows, group: Tensor, step: int, hot: Sequence[int], given: Tensor | None) -> Rows:
        """Return the rows, with these weights' log-probabilities at the step's temperature as mu of `hot` groups."""
        some = torch.nonzero(torch.isin(group, torch.tensor(hot)))[:, 0]
        if not len(some):
            return rows
        places = rows.places(some)
        routes = None if given is None else given[places]
        (found,) = self._scores(self.actor.model, rows.select(some), group[some], step, "logprobs", given=routes)
        return replace(rows, rollout_logprobs=rows.rollout_logprobs.index_copy(0, places, found))

    def _scores(
        self,
        model: PreTrainedModel,
        rows: Rows,
        group: Tensor,
        step: int,
        *names: str,
        given: Tensor | None = None,
        log: RouteLog | None = None,
    ) -> list[Tensor]:
        config = self.config
        settings = (config.temperature_at(step), config.precision, config.forward_tokens)
        return score_rows(model, rows, names, *settings, group, given=given, log=log)
