"""Algorithm: shaping, filters, advantage, correction, objective and aggregation, put together from a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from torch import Tensor

from agent_rl.algorithms.advantages.choices import ADVANTAGES
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.algorithms.batch import Batch, Denominators
from agent_rl.algorithms.choice import Choice, Chosen
from agent_rl.algorithms.corrections import REJECTIONS, WEIGHTS, Weights
from agent_rl.algorithms.experience import Experience
from agent_rl.algorithms.filters import TOLERANCE, Refill
from agent_rl.algorithms.mismatch import correction_metrics, mismatch, policy_version_histogram
from agent_rl.algorithms.objectives.base import TokenLoss
from agent_rl.algorithms.objectives.choices import OBJECTIVES
from agent_rl.algorithms.objectives.kl import KLKind, kl_estimate, kl_in_reward, unbiased_kl
from agent_rl.algorithms.selection import FILTERS, SHAPING
from agent_rl.types import Episode

Shaping = Annotated[Chosen, BeforeValidator(SHAPING.check), SHAPING]
Filter = Annotated[Chosen, BeforeValidator(FILTERS.check), FILTERS]
Advantage = Annotated[Chosen, BeforeValidator(ADVANTAGES.check), ADVANTAGES]
Weight = Annotated[Chosen, BeforeValidator(WEIGHTS.check), WEIGHTS]
Rejection = Annotated[Chosen, BeforeValidator(REJECTIONS.check), REJECTIONS]
Objective = Annotated[Chosen, BeforeValidator(OBJECTIVES.check), OBJECTIVES]
Aggregation = Annotated[Chosen, BeforeValidator(AGGREGATIONS.check), AGGREGATIONS]

USES_MU = ("minirl", "dppo-tv", "dppo-kl", "m2po")
"""Objectives that weigh tokens by the rollout policy themselves."""


class KLConfig(BaseModel):
    """A penalty for leaving a reference policy: the weights that the run started from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: Literal["none", "loss", "reward"] = "none"
    coefficient: float = Field(1e-3, ge=0)
    kind: KLKind | Literal["unbiased"] = "k3"
    """The estimator, see `objectives.kl`; `unbiased` weighs k3 by theta/mu (DeepSeek-V3.2)."""

    @model_validator(mode="after")
    def _meaningful(self) -> KLConfig:
        if self.where == "loss" and self.kind == "k1":
            raise ValueError("kl.kind=k1 has no gradient in expectation: use k2, k3, k1+, k3+ or unbiased in the loss")
        if self.where == "reward" and self.kind == "unbiased":
            raise ValueError("kl.kind=unbiased is for the loss: in the reward, use k1")
        return self


class RefillConfig(BaseModel):
    """Dynamic sampling: sample more groups until the batch is full of groups that the filters keep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rounds: int = Field(1, ge=1)
    """At most; 1 is no dynamic sampling. A batch that isn't full by then is smaller."""
    oversampling: float = Field(3.0, ge=1)
    """A round samples at most this times the groups of a batch."""

    def start(self, target: int) -> Refill:
        """Return the bookkeeping of a batch of `target` groups."""
        return Refill(target, self.max_rounds, self.oversampling)

    @property
    def most(self) -> float:
        """The groups that may be sampled for a batch, in batches."""
        return 1 + (self.max_rounds - 1) * self.oversampling


class AlgorithmConfig(BaseModel):
    """The parts of an algorithm, in the order in which they act; `configs/algorithm/` holds the presets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "grpo"
    shaping: tuple[Shaping, ...] = ()
    """Changes to the scores."""
    filters: tuple[Filter, ...] = ()
    """Which episodes are trained on, judged by their scores; the others still count in their group's statistics."""
    refill: RefillConfig = RefillConfig()
    advantage: Advantage = ADVANTAGES.check("group-relative")
    proximal: Literal["rollout", "recompute"] = "rollout"
    """What `old` is: the rollout's log-probabilities (bypass), or those of a forward pass before the first update."""
    weight: Weight = WEIGHTS.check("none")
    """Correction by old/mu: what each token's loss is multiplied with."""
    rejection: Rejection = REJECTIONS.check("none")
    """Correction by old/mu: which tokens are left out. It acts after the advantages: no reward is lost with them."""
    denominators: Literal["original", "kept"] = "original"
    """Whether rejected tokens still count in the denominators."""
    objective: Objective = OBJECTIVES.check({"name": "ppo-clip", "clip_high_eps": 0.28})
    aggregation: Aggregation = AGGREGATIONS.check("token-mean")
    kl: KLConfig = KLConfig()
    entropy: float = Field(0.0, ge=0)
    """The loss is lowered by this times the mean entropy of the sampled tokens' distributions, in nats."""
    count_zero_advantage: bool = True
    """Whether rows of advantage 0, which are dropped since they have no gradient, still count in the denominators.
    Counted, they make steps smaller the fewer groups are left to learn from, which keeps the end of a run calm; DAPO
    does not count them, as it samples until the batch is full."""

    @model_validator(mode="after")
    def _meaningful(self) -> AlgorithmConfig:
        if self.shaping and self.advantage["name"] == "over-greedy":
            raise ValueError(
                "shaping would change the scores but not those of the greedy episodes they are compared with"
            )
        corrected = self.weight["name"] != "none" or self.rejection["name"] != "none"
        if corrected and self.proximal == "rollout":
            raise ValueError(
                "a correction by old/mu has no effect with proximal=rollout, where old is mu: set proximal=recompute"
            )
        if self.refill.max_rounds > 1 and not self.filters:
            raise ValueError("refill.max_rounds makes up for what filters leave out; there are none: set filters")
        if self.denominators == "kept" and self.rejection["name"] == "none":
            raise ValueError("denominators=kept needs a rejection; without one every token is kept")
        if self.weight["name"] != "none" and self.objective["name"] in USES_MU:
            raise ValueError(
                f"objective={self.objective['name']} already weighs tokens by theta/mu; weight={self.weight['name']} "
                "would do it twice: set weight=none"
            )
        return self


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
        old, mu = batch.old_logprobs, batch.rollout_logprobs
        keep = REJECTIONS.bind(config.rejection)(old, mu, trained)
        weights = torch.where(keep, WEIGHTS.bind(config.weight)(old, mu, trained), old.new_zeros(()))
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
        old, mu = batch.old_logprobs, batch.rollout_logprobs
        keep = REJECTIONS.bind(self.config.rejection)(old, mu, trained)
        weights = Weights(WEIGHTS.bind(self.config.weight)(old, mu, trained), keep)
        ages = policy_version_histogram(batch.versions, int(batch.versions.max()))
        return mismatch(old, mu, trained, batch.turns) | correction_metrics(weights, trained) | ages

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

    def formula(self) -> str:
        """Return the algorithm in one line: advantage, correction, objective, aggregation."""
        return "; ".join(choice.formula for _, choice, chosen in self._parts() if chosen["name"] != "none")

    def explain(self) -> str:
        """Return the composed formula, each part with its knobs' values and its source."""
        config = self.config
        old = "mu itself" if config.proximal == "rollout" else "recomputed before the first update"
        lines = [f"{config.name}: mu sampled the tokens, old is {old}, theta is trained."]
        for part, choice, chosen in self._parts():
            knobs = ", ".join(f"{k}={v}" for k, v in chosen.items() if k != "name")
            lines.append(f"  {part:12} {chosen['name']}" + (f" ({knobs})" if knobs else ""))
            if chosen["name"] != "none":
                lines.append(f"  {'':12}   {choice.formula}" + (f"   -- {choice.source}" if choice.source else ""))
        if config.refill.max_rounds > 1:
            rounds = f"at most {config.refill.max_rounds} rounds of {config.refill.oversampling} batches"
            lines.append(f"  {'refill':12} until the filters have kept a full batch; {rounds}")
        if config.kl.where != "none":
            kl = f"{config.kl.coefficient} * KL(theta || start of the run), estimated by {config.kl.kind}"
            lines.append(
                f"  {'kl':12} {kl}, is {'added to the loss' if config.kl.where == 'loss' else 'taken from the reward'}"
            )
        if config.entropy:
            lines.append(f"  {'entropy':12} {config.entropy} times the mean entropy is taken from the loss")
        zero = "count" if config.count_zero_advantage else "don't count"
        lines.append(f"  {'denominators':12} {config.denominators}; rows of advantage 0 {zero}")
        return "\n".join(lines)

    def _parts(self) -> list[tuple[str, Choice[Tensor] | Choice[TokenLoss], Chosen]]:
        config = self.config
        return [
            *(("shaping", SHAPING[c], c) for c in config.shaping),
            *(("filter", FILTERS[c], c) for c in config.filters),
            ("advantage", ADVANTAGES[config.advantage], config.advantage),
            ("weight", WEIGHTS[config.weight], config.weight),
            ("rejection", REJECTIONS[config.rejection], config.rejection),
            ("objective", OBJECTIVES[config.objective], config.objective),
            ("aggregation", AGGREGATIONS[config.aggregation], config.aggregation),
        ]
