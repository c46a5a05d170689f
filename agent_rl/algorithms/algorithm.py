"""Algorithm: shaping, filters, advantage, correction, objective and aggregation, put together from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeVar, cast

import torch
from torch import Tensor

from agent_rl.algorithms import components
from agent_rl.algorithms.advantages.estimate import AdvantageEstimate
from agent_rl.algorithms.aggregation import shares_of_prompts, tokens_of_sequences
from agent_rl.algorithms.batch import CriticTargets, Denominators, ScoredRows, WeightedRows
from agent_rl.algorithms.components import Part, computed
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.corrections import Weights, rollout_gap
from agent_rl.algorithms.diagnostics import (
    correction_metrics,
    mismatch,
    policy_version_histogram,
    tool_error_metrics,
)
from agent_rl.algorithms.experience import Experience
from agent_rl.algorithms.layouts import call
from agent_rl.algorithms.loss import LossTerms, MicroBatchLoss
from agent_rl.algorithms.objectives.base import Prepared
from agent_rl.algorithms.objectives.kl import KLKind, kl_in_reward
from agent_rl.algorithms.objectives.value import value_loss
from agent_rl.algorithms.on_tokens import of_tokens, on_tokens, settled, shaped
from agent_rl.algorithms.requirements import Requirements
from agent_rl.algorithms.whole_episodes import sequences_of
from agent_rl.core.episode import ROUNDING, EpisodeGroup
from agent_rl.core.trajectory import Source
from agent_rl.errors import ConfigError
from agent_rl.moe.agreement import routing_metrics

R = TypeVar("R")


class Algorithm(Requirements):
    """What both backends call: groups → experience → weighted rows → for each update: prepared rows → loss."""

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self.shaping = tuple(components.shaping.bind(chosen) for chosen in config.shaping)
        self.endings = {name: what for name, what in config.endings.model_dump().items() if what != "train"}
        self.filters = tuple(components.filter.bind(chosen) for chosen in config.filters)
        self.advantage = components.advantage.bind(config.advantage)
        self.finish_advantage = components.advantage.bind_finish(config.advantage)
        self.weight = components.weight.bind(config.weight) if config.weight else None
        self.finish_weight = components.weight.bind_finish(config.weight) if config.weight else None
        self.rejections = tuple(components.rejection.bind(chosen) for chosen in config.rejection)
        self.objective = components.objective.bind(config.objective)
        prepare = components.objective[config.objective].prepare
        self.preparation = Part(self.objective.name, prepare, config.objective) if prepare else None
        drift = components.objective[config.objective].drift
        self.drift = Part(self.objective.name, drift, config.objective) if drift else None
        self.negative_mask = components.negative_mask.bind(config.negative_mask) if config.negative_mask else None
        self.reads_episodes = self.drift is not None or self.negative_mask is not None
        """Whether the loss of a row follows from all rows of its episode."""
        self.aggregation = components.aggregation.bind(config.aggregation)
        self.loss = MicroBatchLoss(config, self.objective, self.negative_mask, self.aggregation)

    def __reduce__(self) -> tuple[type[Algorithm], tuple[AlgorithmConfig]]:
        return Algorithm, (self.config,)  # by its names: a user's functions are looked up where it is unpickled

    def experience(self, groups: Sequence[EpisodeGroup]) -> Experience:
        """Read the groups of a step, shape the episodes' scores and mark what is trained on."""
        x = Experience.of(groups)
        x = x.without(groups, self.endings) if self.endings else x
        rows, scores, unshaped = x.rows, x.scores, SimpleNamespace(unshaped=x.scores)
        for shape in self.shaping:
            found = call(shape, rows, of_tokens(rows), SimpleNamespace(scores=scores), x)
            scores = shaped(shape, found, x.scores.shape)
        x = x.rescored(scores) if self.shaping else x
        for keep in self.filters:
            kept = shaped(keep, call(keep, rows, of_tokens(rows), x, unshaped), x.kept.shape)
            x = replace(x, kept=x.kept & kept)
        return x

    @torch.no_grad()
    def compute_weights(self, x: Experience, scored: ScoredRows) -> tuple[WeightedRows, Denominators]:
        """Compute advantages and the critic's targets, then weights.

        A critic is trained at all tokens that it was asked about, be they rejected for the policy, or without an
        advantage.

        Returns:
            The rows that have a gradient, and the counts that their loss is divided by.

        Raises:
            ConfigError: if an advantage reads what was not computed.
        """
        batch, whole, wanted = self.compute_weights_in_place_order(x, scored)
        return batch.select(torch.nonzero(wanted)[:, 0]), whole

    @torch.no_grad()
    def compute_weights_in_place_order(
        self, x: Experience, scored: ScoredRows
    ) -> tuple[WeightedRows, Denominators, Tensor]:
        """As `compute_weights`, with every row in its place; also return which rows have a gradient, bool `[B]`."""
        config, rows, trained = self.config, x.rows, _trained(x)
        if {"rewards", "turn_rewards"}.intersection(self.advantage.reads) and rows.rewards[~rows.loss_mask].any():
            x = replace(x, rows=replace(rows, rewards=settled(rows)))  # some are on tokens of the environment
        if config.kl.where == "reward":
            x = self._penalised(x, scored)
        advantages, critic = self._advantages(x, scored, trained)
        corrects = self.weight or self.rejections or config.routing.min_agreement
        correction = self._correct(scored, trained) if corrects else Weights(trained.float(), trained)
        counted = correction.keep if config.denominators == "kept" else trained
        differs = advantages.abs() >= ROUNDING
        if not config.count_zero_advantage:
            group = x.groups[rows.episode_of_token]
            informative = torch.zeros_like(x.kept).index_fill(0, group[differs], True)  # there are fewer groups
            counted = counted & informative[group]
        batch = WeightedRows(
            scored,
            advantages=advantages.float(),
            weights=torch.where(correction.keep, correction.weight, 0.0),
            counted=counted,
            group=x.groups[rows.episode],
        )
        batch = self.shares(batch)
        learns = torch.zeros_like(rows.lengths, dtype=torch.bool)
        if critic is not None:
            values = computed(scored.values, "values", self.advantage.name)
            batch = replace(batch, critic=CriticTargets(values, critic.returns.float(), critic.valued))
            learns = rows.sum(critic.valued) > 0
        always = config.entropy or config.kl.where == "loss"
        has_gradient = (rows.sum(differs) > 0) & (rows.sum(batch.weights != 0) > 0)
        wanted = (rows.sum(counted) > 0 if always else has_gradient) | learns
        if self.reads_episodes:  # a row without a gradient is part of its episode's ratio
            wanted = torch.zeros_like(x.kept).index_fill(0, rows.episode[wanted], True)[rows.episode]
        return batch, batch.denominators, wanted

    def shares(self, batch: WeightedRows) -> WeightedRows:
        """Return rows with what their aggregation reads of the others, as if they were all of an update."""
        reads, counted = self.aggregation.reads, batch.rows.sum(batch.counted)
        if "prompt_shares" in reads:
            batch = replace(batch, prompt_shares=shares_of_prompts(counted, batch.group))
        if "sequence_tokens" in reads:
            batch = replace(batch, sequence_tokens=tokens_of_sequences(counted, batch.rows.episode))
        return batch

    def _advantages(
        self, x: Experience, scored: ScoredRows, trained: Tensor
    ) -> tuple[Tensor, AdvantageEstimate | None]:
        """The advantages of tokens, float64 `[N]`, 0 where nothing is trained; and what a critic is trained towards."""
        flat = of_tokens(x.rows) | {"trained": trained}
        flat |= {name: getattr(scored, name) for name in SCORES}
        found = on_tokens(self.advantage, call(self.advantage, x.rows, flat, x, groups=x.groups), x)
        advantages, critic = (found.advantages, found) if isinstance(found, AdvantageEstimate) else (found, None)
        if (finish := self.finish_advantage) is not None:
            advantages = call(finish, x.rows, flat | {"found": advantages}, x)
        return torch.where(trained, advantages, advantages.new_zeros(())), critic

    @torch.no_grad()
    def diagnose(self, x: Experience, scored: ScoredRows, version: int | None = None) -> dict[str, float]:
        """Return how old the tokens are and, where old is recomputed, its distance from mu and the corrections for it.

        With greedy episodes also what they scored: the mean over the episodes that are compared with them. `version` is
        that of the weights that are about to be trained; the newest that sampled if left out.
        """
        rows, trained = x.rows, _trained(x)
        version = int(rows.versions.max()) if version is None else version
        ages = policy_version_histogram(rows.versions, version)
        if x.baselines.isfinite().any():
            ages["rollout/greedy"] = float(x.baselines.nanmean())
        if not self.recomputes_old:
            return ages
        sampled = torch.nonzero(rows.loss_mask)[:, 0]
        before = rows.sources.roll(1).index_fill(0, rows.starts, -1)
        old, mu = scored.old_logprobs, rows.rollout_logprobs
        episode = rows.episode_of_token[sampled]
        arrays = (x[sampled, None] for x in (old, mu, trained, rows.turns))
        age = version - rows.versions[sampled, None]
        gap = mismatch(*arrays, source=before[sampled, None], source_names=[*Source], episode=episode, age=age)
        weights = self._correct(scored, trained)
        weights = Weights(weights.weight[sampled, None], weights.keep[sampled, None])
        correction = correction_metrics(weights, trained[sampled, None], episode)
        some = rows.sum(trained) > 0
        routing = routing_metrics(scored.agreement, rollout_gap(old, mu, trained), trained, some)
        return gap | correction | ages | routing

    def _correct(self, scored: ScoredRows, trained: Tensor) -> Weights:
        """What each token weighs, by old/mu and by the routes."""
        rows = scored.rows
        flat = of_tokens(rows) | {"mask": trained, "old_logprobs": scored.old_logprobs}
        weight, keep = trained.to(scored.old_logprobs.dtype), trained
        if self.weight is not None:
            weight = shaped(self.weight, call(self.weight, rows, flat), trained.shape, rows)
            if self.finish_weight is not None:
                weight = call(self.finish_weight, rows, flat | {"found": weight})
        if self.config.routing.min_agreement:
            if (agreement := scored.agreement) is None:
                raise ConfigError("routing.min_agreement needs the routes of a mixture of experts: leave it out")
            # as with IcePop it still counts in the denominators; where the agreement is NaN, not known, it stays
            weight = torch.where(agreement.tokens < self.config.routing.min_agreement, 0.0, weight)
        for reject in self.rejections:  # each on all that was sampled, so that their order says nothing
            keep = keep & shaped(reject, call(reject, rows, flat), trained.shape, rows)
        return Weights(weight, keep)

    @torch.no_grad()
    def advantage_metrics(self, x: Experience, batch: WeightedRows) -> dict[str, float]:
        """Compare the advantages that `compute_weights` returned with failed tool calls; see `tool_error_metrics`."""
        total = torch.zeros_like(x.scores).index_add(0, batch.rows.episode, batch.rows.sum(batch.advantages))
        return tool_error_metrics(total / x.lengths.clamp(min=1), x.tool_errors, x.kept & (x.lengths > 0))

    def _penalised(self, x: Experience, scored: ScoredRows) -> Experience:
        """Take the KL penalty from the rewards of the tokens, and from the scores."""
        kl, rows = self.config.kl, x.rows
        rewards = kl_in_reward(
            rows.rewards,
            scored.old_logprobs,
            computed(scored.reference_logprobs, "reference_logprobs", "kl.where=reward"),
            rows.loss_mask,
            coefficient=kl.coefficient,
            kind=cast(KLKind, kl.kind),  # the config has refused "unbiased"
        )
        change = rows.sum(torch.where(rows.loss_mask, rewards - rows.rewards, 0.0))
        scores = x.scores.index_add(0, rows.episode, change)
        return replace(x, scores=scores, rows=replace(rows, rewards=rewards))

    @torch.no_grad()
    def prepare(self, logprobs: Tensor, batch: WeightedRows) -> tuple[WeightedRows, dict[str, float]]:
        """Prepare a weighted batch for one update, with the metrics of its preparation.

        It is returned unchanged unless it `prepares` such a batch. `logprobs`, `[N]`, are of every token of the whole
        batch, as `compute_weights` returned it, under theta before the update.
        """
        if not self.prepares(batch):
            return batch, {}
        rows, reference = batch.rows, batch.scored.reference_logprobs
        flat = {
            "logprobs": logprobs,
            "old_logprobs": batch.scored.old_logprobs,
            "rollout_logprobs": rows.rollout_logprobs,
            "reference_logprobs": reference,
            "mask": rows.loss_mask,
            "advantages": batch.advantages,
            "sides": batch.advantages,
            "weights": batch.weights,
        }
        metrics = dict[str, float]()
        if self.preparation is not None:
            batch, metrics = self._decided(self.preparation, batch, flat)
        if self._has_parts_of_episodes(batch):
            batch = replace(batch, sequences=sequences_of(batch, flat, self.drift, self.negative_mask))
        return batch, metrics

    def _decided(
        self, preparation: Part[Prepared], batch: WeightedRows, flat: Mapping[str, Tensor | None]
    ) -> tuple[WeightedRows, dict[str, float]]:
        """Return a batch with what the objective decided about all of it, and its metrics."""
        rows = batch.rows
        sampled = torch.nonzero(rows.loss_mask)[:, 0]
        known = SimpleNamespace(**{name: None if x is None else x[sampled, None] for name, x in flat.items()})
        made = preparation(known, SimpleNamespace(group=batch.group[rows.row_of_token[sampled]]))

        def flat_again(found: Tensor | None, otherwise: Tensor) -> Tensor:
            return otherwise if found is None else torch.zeros_like(otherwise).index_put((sampled,), found[:, 0])

        advantages = flat_again(made.advantages, batch.advantages)
        return replace(batch, advantages=advantages, weights=flat_again(made.weights, batch.weights)), made.metrics

    def prepares(self, batch: WeightedRows) -> bool:
        """Whether theta has to score a batch before each update: always, or since episodes have several rows."""
        return self.needs_scores_before_update or self._has_parts_of_episodes(batch)

    def _has_parts_of_episodes(self, batch: WeightedRows) -> bool:
        """Whether what is read of whole episodes is in several rows."""
        return self.reads_episodes and len(torch.unique(batch.rows.episode)) < len(batch)

    def value_loss(self, values: Tensor, targets: CriticTargets, whole: Denominators) -> LossTerms:
        """Return a micro-batch's share of the critic's loss, the mean over all tokens of `whole` that it is trained at.

        `values`, `[B, T]`, are of the state before every token, by the critic in training, with gradient.
        """
        critic = self.config.critic
        per_token, clipped = value_loss(
            values, targets.values, targets.returns, targets.valued, clip_eps=critic.clip_eps
        )
        total = per_token.sum()
        sums = {"vf_loss": float(total.detach()), "vf_clipfrac": float(clipped.sum())}
        return LossTerms(critic.coefficient * total / whole.valued, sums)


def _trained(x: Experience) -> Tensor:
    """The sampled tokens of the episodes that are trained on, bool `[N]`."""
    return x.rows.loss_mask & x.kept[x.rows.episode_of_token]


SCORES = ("old_logprobs", "reference_logprobs", "values", "sum_pi_squared")
"""What advantages may read of scored rows."""
