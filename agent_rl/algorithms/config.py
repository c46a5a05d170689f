"""The settings of an algorithm: one named choice for each part, and what makes no sense together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agent_rl.algorithms.advantages.choices import ADVANTAGES
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.algorithms.choice import Chosen
from agent_rl.algorithms.corrections import REJECTIONS, WEIGHTS
from agent_rl.algorithms.filters import Refill
from agent_rl.algorithms.objectives.choices import OBJECTIVES
from agent_rl.algorithms.objectives.kl import KLKind
from agent_rl.algorithms.selection import FILTERS, SHAPING

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
    """The parts of an algorithm, in the order in which they act; `configs/algorithm/` holds the presets.

    Whatever is chosen, log-ratios are clamped to ± 20 before exponentiation: a token's in objectives and token
    corrections, a row's sum or mean in sequence ones. Knobs beyond e^± 20 have no effect.
    """

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
