"""Algorithm: shaping, filters, advantage, correction, objective and aggregation, put together from a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from agent_rl.algorithms.advantages.choices import ADVANTAGES
from agent_rl.algorithms.advantages.critic import AdvantageEstimate
from agent_rl.algorithms.advantages.token import settle
from agent_rl.algorithms.aggregation import AGGREGATIONS, prompt_shares
from agent_rl.algorithms.batch import Batch, Denominators
from agent_rl.algorithms.config import USES_REFERENCE, AlgorithmConfig
from agent_rl.algorithms.corrections import REJECTIONS, WEIGHTS, Weights, route_mask
from agent_rl.algorithms.diagnostics import correction_metrics, mismatch, policy_version_histogram
from agent_rl.algorithms.experience import Experience
from agent_rl.algorithms.filters import TOLERANCE
from agent_rl.algorithms.metrics import tool_error_metrics
from agent_rl.algorithms.objectives.choices import NEGATIVE_MASKS, preparation, token_loss
from agent_rl.algorithms.objectives.kl import KLKind, kl_estimate, kl_in_reward, unbiased_kl
from agent_rl.algorithms.objectives.pairwise import PreparedBatch
from agent_rl.algorithms.objectives.value import value_loss
from agent_rl.algorithms.selection import FILTERS, SHAPING
from agent_rl.core.episode import EpisodeGroup
from agent_rl.core.trajectory import Source
from agent_rl.moe.agreement import agreement_of, routing_metrics


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's share of the loss, with sums over its sampled tokens to report means from."""

    loss: Tensor
    sums: dict[str, float]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What both backends call: episodes → experience → weighed rows → for each update: prepared rows → loss."""

    config: AlgorithmConfig

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage compares with a greedy episode of each group."""
        return self.config.advantage["name"] == "over-greedy"

    @property
    def needs_reference(self) -> bool:
        """Whether rows need log-probabilities under the policy that the run started from."""
        return self.config.kl.where != "none" or self.config.objective["name"] in USES_REFERENCE

    @property
    def needs_scores_before_update(self) -> bool:
        """Whether the whole batch must be scored and prepared before each update."""
        return preparation(self.config.objective) is not None

    @property
    def needs_states(self) -> bool:
        """Whether the advantage compares turns by `Env.state_hash`."""
        return self.config.advantage["name"] == "step-grouped"

    @property
    def needs_distributions(self) -> bool:
        """Whether the advantage weighs by the distributions that tokens came from: by `Batch.sum_pi_squared`."""
        return self.config.advantage["name"] == "optimal-baseline"

    @property
    def needs_values(self) -> bool:
        """Whether the advantage needs `Experience.state_values`, of continuations that `vine.plan` asks for."""
        return self.config.advantage["name"] == "state-values"

    def experience(self, groups: Sequence[EpisodeGroup]) -> Experience:
        """Read the groups of a step, shape the episodes' scores and mark what is trained on."""
        x = Experience.of(groups)
        scores = x.scores
        for chosen in self.config.shaping:
            scores = SHAPING.bind(chosen)(replace(x, scores=scores))
        x = x.rescored(scores) if self.config.shaping else x
        for chosen in self.config.filters:
            x = replace(x, kept=x.kept & FILTERS.bind(chosen)(x))
        return x

    @torch.no_grad()
    def compute_weights(self, x: Experience) -> tuple[Batch, Denominators]:
        """Compute advantages and the critic's targets, then weights, from `x.rows` whose `old_logprobs` are final.

        An advantage over a critic's values reads `x.rows.values`. Its critic is trained at all tokens that it was asked
        about, be they rejected for the policy, or without an advantage.

        Returns:
            The rows that have a gradient, and the counts that their loss is divided by.
        """
        batch, whole, wanted = self.compute_weights_in_place_order(x)
        return batch.rows(torch.nonzero(wanted)[:, 0].tolist()), whole

    @torch.no_grad()
    def compute_weights_in_place_order(self, x: Experience) -> tuple[Batch, Denominators, Tensor]:
        """As `compute_weights`, with every row in its place; also return which rows have a gradient, bool `[B]`."""
        config, trained = self.config, x.trained
        x = replace(x, batch=replace(x.rows, rewards=settle(x.rows.rewards, x.rows.loss_mask).float()))
        x = self._penalised(x) if config.kl.where == "reward" else x
        batch = x.rows
        found = AdvantageEstimate.of(ADVANTAGES.bind(config.advantage)(x))
        advantages = torch.where(trained, found.advantages, found.advantages.new_zeros(()))
        correction = self._corrected(batch, trained)
        keep, weights = correction.keep, torch.where(correction.keep, correction.weight, 0.0)
        counted = keep if config.denominators == "kept" else trained
        informative = (advantages.abs() >= TOLERANCE).any(-1)
        if not config.count_zero_advantage:
            counted = counted & informative[:, None]
        batch = replace(
            batch,
            advantages=advantages.float(),
            weights=weights,
            counted=counted,
            group=x.groups[batch.episode],
            prompt_shares=prompt_shares(counted, x.groups[batch.episode]),
            returns=found.returns.float(),
            valued=found.valued,
        )
        always = config.entropy or config.kl.where == "loss"
        wanted = trained.any(-1) if always else (informative & (weights != 0).any(-1)) | found.valued.any(-1)
        return batch, Denominators.of(counted, found.valued), wanted

    @torch.no_grad()
    def diagnose(self, x: Experience, version: int | None = None) -> dict[str, float]:
        """Say how old the tokens are and, where old is recomputed, how far it is from mu and what corrects for that.

        And what greedy episodes scored, where there are any: the mean over the episodes that are compared with them.

        Args:
            x: the experience of a step; `old_logprobs` are final.
            version: of the weights that are about to be trained; the newest that sampled if left out.
        """
        batch, trained = x.rows, x.trained
        ages = policy_version_histogram(batch.versions, int(batch.versions.max()) if version is None else version)
        if x.baselines.isfinite().any():
            ages["rollout/greedy"] = float(x.baselines.nanmean())
        if self.config.proximal == "rollout":
            return ages
        before = torch.cat([torch.full_like(batch.sources[:, :1], -1), batch.sources[:, :-1]], -1)
        old, mu = batch.old_logprobs, batch.rollout_logprobs
        gap = mismatch(old, mu, trained, batch.turns, source=before, source_names=[*Source])
        correction = correction_metrics(self._corrected(batch, trained), trained)
        return gap | correction | ages | routing_metrics(batch, trained)

    def _corrected(self, batch: Batch, trained: Tensor) -> Weights:
        """Decide by old/mu, and by the routes, what each token weighs."""
        config, old, mu = self.config, batch.old_logprobs, batch.rollout_logprobs
        weight = WEIGHTS.bind(config.weight)(old, mu, trained)
        if config.routing.min_agreement:
            weight = route_mask(weight, agreement_of(batch), min_agreement=config.routing.min_agreement)
        return Weights(weight, REJECTIONS.bind(config.rejection)(old, mu, trained))

    @torch.no_grad()
    def advantage_metrics(self, x: Experience, batch: Batch) -> dict[str, float]:
        """Compare advantages with failed tool calls; see `tool_error_metrics`.

        Args:
            x: what `compute_weights` was given.
            batch: what it returned.
        """
        total = torch.zeros_like(x.scores).index_add(0, batch.episode, batch.advantages.double().sum(-1))
        return tool_error_metrics(total / x.lengths.clamp(min=1), x.tool_errors, x.kept & (x.lengths > 0))

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

    @torch.no_grad()
    def prepare(self, logprobs: Tensor, batch: Batch) -> PreparedBatch:
        """Prepare a weighed batch for one update; return it unchanged unless `needs_scores_before_update`.

        Args:
            logprobs: of every token of the whole batch under theta as it is before the update, `[B, T]`.
            batch: the whole batch, as `compute_weights` returned it; no update changes it.
        """
        prepare = preparation(self.config.objective)
        return PreparedBatch(batch, {}) if prepare is None else prepare(logprobs, batch)

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: Batch, whole: Denominators) -> LossTerms:
        """Return a micro-batch's share of the loss of the batch that `whole` counts.

        Args:
            logprobs: of every token given those before it, under theta, `[B, T]`, with gradient.
            entropy: of the distributions they come from, `[B, T]`, with gradient if `config.entropy` is not 0.
            batch: the micro-batch; of a prepared batch, where the objective `needs_scores_before_update`.
            whole: counts over the whole batch.
        """
        config, mask = self.config, batch.loss_mask
        # before any arithmetic: 0 * NaN is NaN, so what stands outside the mask would come back with the gradient
        nothing = logprobs.new_zeros(())
        logprobs, old, mu, reference = (
            torch.where(mask, x, nothing)
            for x in (logprobs, batch.old_logprobs, batch.rollout_logprobs, batch.reference_logprobs)
        )
        token = token_loss(config.objective)(logprobs, old, mu, batch.advantages, mask)
        gone = NEGATIVE_MASKS.bind(config.negative_mask)(logprobs, mu, batch.advantages, mask)
        per_token = torch.where(gone[:, None], nothing, token.loss * batch.weights)
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
        loss = AGGREGATIONS.bind(config.aggregation)(per_token, batch.counted, whole, batch.prompt_shares)
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
            if config.negative_mask["name"] != "none":
                sums["masked_fraction"] = float(mask[gone].sum())
            if config.kl.where != "none":
                sums["reference_kl"] = float(
                    (logprobs - reference)[mask].double().sum()
                )  # k1: unbiased, can be negative
        return LossTerms(loss, sums)

    def value_loss(self, values: Tensor, batch: Batch, whole: Denominators) -> LossTerms:
        """Return a micro-batch's share of the critic's loss: the mean over all tokens that it is trained at.

        Args:
            values: of the state before every token, by the critic in training, `[B, T]`, with gradient.
            batch: the micro-batch; its `values` are those that the advantages are from.
            whole: counts over the whole batch.
        """
        critic = self.config.critic
        per_token, clipped = value_loss(values, batch.values, batch.returns, batch.valued, clip_eps=critic.clip_eps)
        total = per_token.sum()
        sums = {"vf_loss": float(total.detach()), "vf_clipfrac": float(clipped.sum())}
        return LossTerms(critic.coefficient * total / whole.valued, sums)
