"""Algorithm: shaping, filters, advantage, correction, objective and aggregation, put together from a config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TypeVar, cast

import torch
from torch import Tensor

from agent_rl.algorithms import components
from agent_rl.algorithms.advantages.episode import on_tokens
from agent_rl.algorithms.advantages.estimate import AdvantageEstimate, TurnAdvantages
from agent_rl.algorithms.advantages.token import settle
from agent_rl.algorithms.advantages.turn import spread
from agent_rl.algorithms.aggregation import shares_of_prompts
from agent_rl.algorithms.batch import CriticTargets, Denominators, LossInputs, ScoredRows, WeightedRows
from agent_rl.algorithms.components import Part, computed
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.corrections import Weights, clamped_exp, log_ratio
from agent_rl.algorithms.diagnostics import (
    correction_metrics,
    mismatch,
    policy_version_histogram,
    tool_error_metrics,
)
from agent_rl.algorithms.experience import Experience
from agent_rl.algorithms.group_stats import TOLERANCE
from agent_rl.algorithms.objectives.base import TokenLoss
from agent_rl.algorithms.objectives.kl import KLKind, kl_estimate, kl_in_reward, unbiased_kl
from agent_rl.algorithms.objectives.value import value_loss
from agent_rl.algorithms.requirements import Requirements
from agent_rl.core.episode import EpisodeGroup
from agent_rl.core.trajectory import Source
from agent_rl.errors import ConfigError, DefinitionError
from agent_rl.moe.agreement import routing_metrics

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's share of the loss, with sums over its sampled tokens to report means from."""

    loss: Tensor
    sums: dict[str, float]


class Algorithm(Requirements):
    """What both backends call: groups → experience → weighted rows → for each update: prepared rows → loss."""

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self.shaping = tuple(components.shaping.bind(chosen) for chosen in config.shaping)
        self.endings = {name: what for name, what in config.endings.model_dump().items() if what != "train"}
        self.filters = tuple(components.filter.bind(chosen) for chosen in config.filters)
        self.advantage = components.advantage.bind(config.advantage)
        self.weight = components.weight.bind(config.weight) if config.weight else None
        self.rejection = components.rejection.bind(config.rejection) if config.rejection else None
        self.objective = components.objective.bind(config.objective)
        prepare = components.objective[config.objective].prepare
        self.preparation = Part(self.objective.name, prepare, config.objective) if prepare else None
        self.negative_mask = components.negative_mask.bind(config.negative_mask) if config.negative_mask else None
        self.aggregation = components.aggregation.bind(config.aggregation)

    def __reduce__(self) -> tuple[type[Algorithm], tuple[AlgorithmConfig]]:
        return Algorithm, (self.config,)  # by its names: a user's functions are looked up where it is unpickled

    def experience(self, groups: Sequence[EpisodeGroup]) -> Experience:
        """Read the groups of a step, shape the episodes' scores and mark what is trained on."""
        x = Experience.of(groups)
        x = _without(x, groups, self.endings) if self.endings else x
        read, scores = SimpleNamespace(mask=x.rows.loss_mask), x.scores
        for shape in self.shaping:
            scores = _shaped(shape, shape(SimpleNamespace(scores=scores), x, x.rows, read), x.scores.shape)
        x = x.rescored(scores) if self.shaping else x
        for keep in self.filters:
            kept = _shaped(keep, keep(x, x.rows, read), x.kept.shape)
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
        config, trained = self.config, _trained(x)
        if {"rewards", "turn_rewards"}.intersection(self.advantage.reads):  # they may be on tokens of the environment
            rewards = settle(x.rows.rewards, x.rows.loss_mask).float()
            x = replace(x, rows=replace(x.rows, rewards=rewards))
        if config.kl.where == "reward":
            x = self._penalised(x, scored)
        read = SimpleNamespace(mask=x.rows.loss_mask, trained=trained)
        found = _on_rows(self.advantage, self.advantage(x, x.rows, scored, read), x)
        advantages, critic = (found.advantages, found) if isinstance(found, AdvantageEstimate) else (found, None)
        advantages = torch.where(trained, advantages, advantages.new_zeros(()))
        corrects = self.weight or self.rejection or config.routing.min_agreement
        correction = self._correct(scored, trained) if corrects else Weights(trained.float(), trained)
        counted = correction.keep if config.denominators == "kept" else trained
        informative = (advantages.abs() >= TOLERANCE).any(-1)
        if not config.count_zero_advantage:
            counted = counted & informative[:, None]
        group = x.groups[x.rows.episode]
        batch = WeightedRows(
            scored,
            advantages=advantages.float(),
            weights=torch.where(correction.keep, correction.weight, 0.0),
            counted=counted,
            group=group,
            prompt_shares=shares_of_prompts(counted, group) if "prompt_shares" in self.aggregation.reads else None,
        )
        learns = torch.zeros_like(informative)
        if critic is not None:
            values = computed(scored.values, "values", self.advantage.name)
            batch = replace(batch, critic=CriticTargets(values, critic.returns.float(), critic.valued))
            learns = critic.valued.any(-1)
        always = config.entropy or config.kl.where == "loss"
        wanted = trained.any(-1) if always else (informative & (batch.weights != 0).any(-1)) | learns
        return batch, Denominators.of(counted, None if critic is None else critic.valued), wanted

    @torch.no_grad()
    def diagnose(self, x: Experience, scored: ScoredRows, version: int | None = None) -> dict[str, float]:
        """Return how old the tokens are and, where old is recomputed, its distance from mu and the corrections for it.

        With greedy episodes also what they scored: the mean over the episodes that are compared with them. `version` is
        that of the weights that are about to be trained; the newest that sampled if left out.
        """
        rows, trained = x.rows, _trained(x)
        ages = policy_version_histogram(rows.versions, int(rows.versions.max()) if version is None else version)
        if x.baselines.isfinite().any():
            ages["rollout/greedy"] = float(x.baselines.nanmean())
        if not self.config.recomputes_old:
            return ages
        before = torch.cat([torch.full_like(rows.sources[:, :1], -1), rows.sources[:, :-1]], -1)
        old, mu = scored.old_logprobs, rows.rollout_logprobs
        gap = mismatch(old, mu, trained, rows.turns, source=before, source_names=[*Source])
        correction = correction_metrics(self._correct(scored, trained), trained)
        routing = routing_metrics(scored.agreement, log_ratio(old, mu, trained), trained)
        return gap | correction | ages | routing

    def _correct(self, scored: ScoredRows, trained: Tensor) -> Weights:
        """What each token weighs, by old/mu and by the routes."""
        read, rows = SimpleNamespace(mask=trained), scored.rows
        weight, keep = trained.to(scored.old_logprobs.dtype), trained
        if self.weight is not None:
            weight = _shaped(self.weight, self.weight(scored, read, rows), trained.shape)
        if self.config.routing.min_agreement:
            if (agreement := scored.agreement) is None:
                raise ConfigError("routing.min_agreement needs the routes of a mixture of experts: leave it out")
            # as with IcePop it still counts in the denominators; where the agreement is NaN, not known, it stays
            weight = torch.where(agreement.tokens < self.config.routing.min_agreement, 0.0, weight)
        if self.rejection is not None:
            keep = _shaped(self.rejection, self.rejection(scored, read, rows), trained.shape)
        return Weights(weight, keep)

    @torch.no_grad()
    def advantage_metrics(self, x: Experience, batch: WeightedRows) -> dict[str, float]:
        """Compare the advantages that `compute_weights` returned with failed tool calls; see `tool_error_metrics`."""
        total = torch.zeros_like(x.scores).index_add(0, batch.rows.episode, batch.advantages.double().sum(-1))
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
        change = torch.where(rows.loss_mask, rewards - rows.rewards, 0.0).sum(-1)
        scores = x.scores.index_add(0, rows.episode, change)
        return replace(x, scores=scores, rows=replace(rows, rewards=rewards.float()))

    @torch.no_grad()
    def prepare(self, logprobs: Tensor, batch: WeightedRows) -> tuple[WeightedRows, dict[str, float]]:
        """Prepare a weighted batch for one update, with the metrics of its preparation.

        It is returned unchanged unless `needs_scores_before_update`. `logprobs`, `[B, T]`, are of every token of the
        whole batch, as `compute_weights` returned it, under theta before the update.
        """
        if self.preparation is None:
            return batch, {}
        known = _masked(batch.inputs, logprobs)
        made = self.preparation(known, SimpleNamespace(group=batch.group, sides=batch.advantages))
        advantages = batch.advantages if made.advantages is None else made.advantages
        weights = batch.weights if made.weights is None else made.weights
        return replace(batch, advantages=advantages, weights=weights), made.metrics

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: LossInputs, whole: Denominators) -> LossTerms:
        """Return a micro-batch's share of the loss of the batch that `whole` counts.

        Log-probabilities of every token given those before it, under theta, and the entropies of the distributions they
        come from are `[B, T]`, with gradient (of the latter only if `config.entropy` is not 0). The micro-batch is of a
        prepared batch, where the objective `needs_scores_before_update`.

        Raises:
            ConfigError: if a part reads what was not computed, such as the reference's log-probabilities.
        """
        config, mask = self.config, batch.loss_mask
        known = _masked(batch, logprobs)
        logprobs, mu, nothing = known.logprobs, known.rollout_logprobs, logprobs.new_zeros(())
        found = self.objective(known)
        token = found if isinstance(found, TokenLoss) else _token_loss(self.objective, found, known)
        per_token, sums = token.loss * batch.weights, dict[str, float]()
        if self.negative_mask is not None:
            gone = _shaped(self.negative_mask, self.negative_mask(known), mask.shape[:1])
            per_token = torch.where(gone[:, None], nothing, per_token)
            sums["masked_fraction"] = float(mask[gone].sum())
        if config.kl.where != "none":
            reference = computed(known.reference_logprobs, "reference_logprobs", f"kl.where={config.kl.where}")
            # k1: unbiased, can be negative
            sums["reference_kl"] = float((logprobs - reference)[mask].detach().double().sum())
        if config.kl.where == "loss":
            if config.kl.kind == "unbiased":
                kl = unbiased_kl(logprobs, mu, reference)
            else:
                kl = kl_estimate(logprobs, reference, kind=config.kl.kind)
            per_token = per_token + config.kl.coefficient * kl
        if config.entropy:
            per_token = per_token - config.entropy * torch.where(mask, entropy, nothing)
        read = SimpleNamespace(loss=per_token, mask=batch.counted, whole=whole)
        loss = self.aggregation(read, batch)
        if loss.dim():
            raise DefinitionError(f"aggregation '{self.aggregation.name}' returned {_described(loss)}: return a scalar")
        with torch.no_grad():
            gap = (logprobs - mu)[mask].double()
            moved = (logprobs - known.old_logprobs)[mask].double()
            sums |= {
                "ratio": float(token.ratio[mask].double().sum()),
                "clip_fraction": float(token.clipped[mask].double().sum()),
                "weight": float(batch.weights[mask].double().sum()),
                "entropy": float(entropy[mask].double().sum()),
                "rollout_gap": float(gap.abs().sum()),
                # k3 estimators of KL(mu || theta) and KL(old || theta), Schulman 2020: non-negative, low variance
                "rollout_kl": float((gap.exp() - 1 - gap).sum()),
                "old_kl": float((moved.exp() - 1 - moved).sum()),
            }
        return LossTerms(loss, sums)

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
    """The sampled tokens of the episodes that are trained on, bool `[B, T]`."""
    return x.rows.loss_mask & x.kept[x.rows.episode, None]


def _masked(batch: LossInputs, logprobs: Tensor) -> SimpleNamespace:
    """The inputs of objectives, 0 at tokens that were not sampled.

    Before any arithmetic: 0 * NaN is NaN, so what is outside the mask would come back with the gradient.
    """
    mask, nothing, reference = batch.loss_mask, logprobs.new_zeros(()), batch.reference_logprobs
    return SimpleNamespace(
        mask=mask,
        logprobs=torch.where(mask, logprobs, nothing),
        old_logprobs=torch.where(mask, batch.old_logprobs, nothing),
        rollout_logprobs=torch.where(mask, batch.rollout_logprobs, nothing),
        reference_logprobs=None if reference is None else torch.where(mask, reference, nothing),
        advantages=batch.advantages,
        weights=batch.weights,
    )


def _on_rows(
    part: Part[Tensor | AdvantageEstimate | TurnAdvantages], found: object, x: Experience
) -> Tensor | AdvantageEstimate:
    """Spread what an advantage returned onto the tokens of the rows."""
    rows, shape = x.rows, x.rows.loss_mask.shape
    if isinstance(found, AdvantageEstimate):
        return found
    if "values" in part.reads:
        raise DefinitionError(
            f"advantage '{part.name}' reads the critic's values but returned {_described(found)}: the critic would "
            "never learn; return an AdvantageEstimate, which has its targets"
        )
    if isinstance(found, TurnAdvantages):
        return spread(found.advantages.nan_to_num(0.0)[rows.episode], rows.turns, rows.loss_mask)
    if isinstance(found, Tensor) and found.shape == x.scores.shape:
        return on_tokens(found, rows.episode, rows.loss_mask)
    if isinstance(found, Tensor) and found.shape == shape:
        return found
    raise DefinitionError(
        f"advantage '{part.name}' returned {_described(found)}: return a tensor of shape [E] = "
        f"{tuple(x.scores.shape)}, a number per episode, or [B, T] = {tuple(shape)}, one per token"
    )


def _shaped(part: Part[Tensor], found: Tensor, shape: torch.Size) -> Tensor:
    """Check the shape of what a part returned."""
    if not isinstance(found, Tensor) or found.shape != shape:
        raise DefinitionError(
            f"'{part.name}' returned {_described(found)}: it must return a tensor of shape {tuple(shape)}"
        )
    return found


def _token_loss(part: Part[TokenLoss | Tensor], found: Tensor, known: SimpleNamespace) -> TokenLoss:
    """Complete an objective's plain loss of tokens `[B, T]` with the ratio theta/old to report."""
    loss = _shaped(cast(Part[Tensor], part), found, known.mask.shape)
    ratio = clamped_exp((known.logprobs - known.old_logprobs).detach())
    return TokenLoss(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def _described(found: object) -> str:
    return f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def _without(x: Experience, groups: Sequence[EpisodeGroup], endings: Mapping[str, str]) -> Experience:
    """Take out the episodes that ended in one of these ways: of the training, and if excluded of their baselines."""
    policies = [endings.get(episode.ending) for group in groups for episode in group.episodes]
    dropped = torch.tensor([policy is not None for policy in policies], dtype=torch.bool)
    excluded = torch.tensor([policy == "exclude" for policy in policies], dtype=torch.bool)
    return replace(x, kept=x.kept & ~dropped, scores=x.scores.masked_fill(excluded, math.nan))
