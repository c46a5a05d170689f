"""Algorithm: shaping, filters, advantage, correction, objective and aggregation, put together from a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from agent_rl.algorithms.advantages.choices import ADVANTAGES
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.algorithms.batch import Batch, Denominators
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.corrections import REJECTIONS, WEIGHTS, Weights, route_mask
from agent_rl.algorithms.experience import Experience
from agent_rl.algorithms.filters import TOLERANCE
from agent_rl.algorithms.mismatch import correction_metrics, mismatch, policy_version_histogram
from agent_rl.algorithms.objectives.choices import OBJECTIVES
from agent_rl.algorithms.objectives.kl import KLKind, kl_estimate, kl_in_reward, unbiased_kl
from agent_rl.algorithms.routing import agreement_of, routing_metrics
from agent_rl.algorithms.selection import FILTERS, SHAPING
from agent_rl.types import Episode


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's share of the loss, with sums over its sampled tokens to report means from."""

    loss: Tensor
    sums: dict[str, float]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What both backends call: episodes → experience → weighed rows → loss."""

    config: AlgorithmConfig

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage compares with a greedy episode of each group."""
        return self.config.advantage["name"] == "over-greedy"

    def experience(self, episodes: Sequence[Episode], greedy: Sequence[Episode] = ()) -> Experience:
        """Read the episodes of a step, shape their scores and mark what is trained on."""
        x = Experience.of(episodes, greedy)
        scores = x.scores
        for chosen in self.config.shaping:
            scores = SHAPING.bind(chosen)(replace(x, scores=scores))
        x = x.rescored(scores) if self.config.shaping else x
        for chosen in self.config.filters:
            x = replace(x, kept=x.kept & FILTERS.bind(chosen)(x))
        return x

    @torch.no_grad()
    def weigh(self, x: Experience) -> tuple[Batch, Denominators]:
        """Compute advantages, then weights, from `x.rows` whose `old_logprobs` are final.

        Returns:
            The rows that have a gradient, and the counts that their loss is divided by.
        """
        config, trained = self.config, x.trained
        x = self._penalised(x) if config.kl.where == "reward" else x
        batch = x.rows
        advantages = ADVANTAGES.bind(config.advantage)(x)
        advantages = torch.where(trained, advantages, advantages.new_zeros(()))
        correction = self._corrected(batch, trained)
        keep, weights = correction.keep, torch.where(correction.keep, correction.weight, 0.0)
        counted = keep if config.denominators == "kept" else trained
        informative = (advantages.abs() >= TOLERANCE).any(-1)
        if not config.count_zero_advantage:
            counted = counted & informative[:, None]
        batch = replace(batch, advantages=advantages.float(), weights=weights, counted=counted)
        always = config.entropy or config.kl.where == "loss"
        wanted = trained.any(-1) if always else informative & (weights != 0).any(-1)
        return batch.rows(torch.nonzero(wanted)[:, 0].tolist()), Denominators.of(counted)

    @torch.no_grad()
    def diagnose(self, x: Experience) -> dict[str, float]:
        """Measure the gap between mu and old, what the correction makes of it, and how old the tokens are."""
        batch, trained = x.rows, x.trained
        gaps = mismatch(batch.old_logprobs, batch.rollout_logprobs, trained, batch.turns)
        correction = correction_metrics(self._corrected(batch, trained), trained)
        ages = policy_version_histogram(batch.versions, int(batch.versions.max()))
        return gaps | correction | ages | routing_metrics(batch, trained)

    def _corrected(self, batch: Batch, trained: Tensor) -> Weights:
        """Decide by old/mu, and by the routes, what each token weighs."""
        config, old, mu = self.config, batch.old_logprobs, batch.rollout_logprobs
        weight = WEIGHTS.bind(config.weight)(old, mu, trained)
        if config.routing.min_agreement:
            weight = route_mask(weight, agreement_of(batch), min_agreement=config.routing.min_agreement)
        return Weights(weight, REJECTIONS.bind(config.rejection)(old, mu, trained))

    def _penalised(self, x: Experience) -> Experience:
        """Take the KL penalty from the rewards of the tokens, and from the scores."""
        kl, batch = self.config.kl, x.rows
        rewards = kl_in_reward(
            batch.rewards,
            batch.old_logprobs,
            batch.reference_logprobs,
            batch.loss_mask,
            coefficient=kl.coefficient,
            kind=cast(KLKind, kl.kind),  # the config has refused "unbiased"
        )
        change = torch.where(batch.loss_mask, rewards - batch.rewards, 0.0).sum(-1)
        scores = x.scores.index_add(0, batch.episode, change)
        return replace(x, scores=scores, batch=replace(batch, rewards=rewards.float()))

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: Batch, whole: Denominators) -> LossTerms:
        """Return a micro-batch's share of the loss of the batch that `whole` counts.

        Args:
            logprobs: of every token given those before it, under theta, `[B, T]`, with gradient.
            entropy: of the distributions they come from, `[B, T]`, with gradient if `config.entropy` is not 0.
            batch: the micro-batch.
            whole: counts over the whole batch.
        """
        config, mask = self.config, batch.loss_mask
        # before any arithmetic: 0 * NaN is NaN, so what stands outside the mask would come back with the gradient
        nothing = logprobs.new_zeros(())
        logprobs, old, mu, reference = (
            torch.where(mask, x, nothing)
            for x in (logprobs, batch.old_logprobs, batch.rollout_logprobs, batch.reference_logprobs)
        )
        token = OBJECTIVES.bind(config.objective)(logprobs, old, mu, batch.advantages, mask)
        per_token = token.loss * batch.weights
        if config.kl.where == "loss":
            kind = config.kl.kind
            kl = (
                unbiased_kl(logprobs, mu, reference)
                if kind == "unbiased"
                else kl_estimate(logprobs, reference, kind=kind)
            )
            per_token = per_token + config.kl.coefficient * kl
        if config.entropy:
            per_token = per_token - config.entropy * torch.where(mask, entropy, nothing)
        loss = AGGREGATIONS.bind(config.aggregation)(per_token, batch.counted, whole)
        with torch.no_grad():
            gap = (logprobs - mu)[mask].double()
            sums = {
                "ratio": float(token.ratio[mask].double().sum()),
                "clip_fraction": float(token.clipped[mask].double().sum()),
                "weight": float(batch.weights[mask].double().sum()),
                "entropy": float(entropy[mask].double().sum()),
                "rollout_gap": float(gap.abs().sum()),
                # k3 estimator of KL(mu || theta), Schulman 2020: non-negative, low variance
                "rollout_kl": float((gap.exp() - 1 - gap).sum()),
            }
            if config.kl.where != "none":
                sums["reference_kl"] = float(
                    (logprobs - reference)[mask].double().sum()
                )  # k1: unbiased, can be negative
        return LossTerms(loss, sums)
