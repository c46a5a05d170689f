"""The settings of an algorithm: one named choice for each part, and what makes no sense together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from agent_rl.algorithms.advantages.choices import ADVANTAGES
from agent_rl.algorithms.advantages.critic import WITH_CRITIC
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.algorithms.components import ComponentConfig
from agent_rl.algorithms.corrections import REJECTIONS, WEIGHTS
from agent_rl.algorithms.dynamic_sampling import DynamicSampling
from agent_rl.algorithms.objectives.choices import NEGATIVE_MASKS, OBJECTIVES
from agent_rl.algorithms.objectives.kl import KLKind
from agent_rl.algorithms.selection import FILTERS, SHAPING
from agent_rl.algorithms.state_values import StateValueConfig
from agent_rl.config import Section
from agent_rl.moe.agreement import RoutingConfig

Shaping = Annotated[ComponentConfig, BeforeValidator(SHAPING.check), SHAPING]
Filter = Annotated[ComponentConfig, BeforeValidator(FILTERS.check), FILTERS]
Advantage = Annotated[ComponentConfig, BeforeValidator(ADVANTAGES.check), ADVANTAGES]
Weight = Annotated[ComponentConfig, BeforeValidator(WEIGHTS.check), WEIGHTS]
Rejection = Annotated[ComponentConfig, BeforeValidator(REJECTIONS.check), REJECTIONS]
Objective = Annotated[ComponentConfig, BeforeValidator(OBJECTIVES.check), OBJECTIVES]
NegativeMask = Annotated[ComponentConfig, BeforeValidator(NEGATIVE_MASKS.check), NEGATIVE_MASKS]
Aggregation = Annotated[ComponentConfig, BeforeValidator(AGGREGATIONS.check), AGGREGATIONS]

USES_MU = ("minirl", "dppo-tv", "dppo-kl", "m2po")
"""Objectives that weigh tokens by the rollout policy themselves."""
USES_REFERENCE = ("dpo",)
"""Objectives that compare with the policy that the run started from, penalty or not."""
OFFLINE = ("dpo",)
"""Objectives that learn from episodes whoever sampled them, so from stored ones, too."""


class KLConfig(Section):
    """A penalty for leaving a reference policy: the weights that the run started from."""

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


class CriticConfig(Section):
    """What predicts returns, for the advantages that are taken over such values."""

    where: Literal["none", "shared", "separate"] = "none"
    """`shared`: a value head on the policy's own trunk, which then learns from both losses. `separate`: a model of its
    own with a head, begun as a copy of the policy."""
    coefficient: float = Field(0.5, gt=0)
    """What the value loss is multiplied with: its weight beside the policy's loss in a shared trunk. A separate critic
    hardly notices, as AdamW divides it out."""
    clip_eps: float | None = Field(0.2, gt=0)
    """How far a value may move in one batch before its gradient stops, in the unit of the returns; null for any."""
    lr: float = Field(1e-3, gt=0)
    """The learning rate of the head and of a separate critic, with the schedule of the policy's."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at first in which only the critic learns; in a shared trunk that is the head."""

    @model_validator(mode="after")
    def _meaningful(self) -> CriticConfig:
        if self.where == "none" and self.warmup_steps:
            raise ValueError(
                f"critic.warmup_steps={self.warmup_steps}: without a critic nothing would learn; set critic.where"
            )
        return self


class DynamicSamplingConfig(Section):
    """Dynamic sampling: sample more groups until the batch is full of groups that the filters keep."""

    max_rounds: int = Field(1, ge=1)
    """At most; 1 is no dynamic sampling. A batch that isn't full by then is smaller."""
    oversampling: float = Field(3.0, ge=1)
    """A round samples at most this times the groups of a batch."""

    def start(self, target: int) -> DynamicSampling:
        """Return the bookkeeping of a batch of `target` groups."""
        return DynamicSampling(target, self.max_rounds, self.oversampling)

    @property
    def most(self) -> float:
        """The groups that may be sampled for a batch, in batches."""
        return 1 + (self.max_rounds - 1) * self.oversampling


class AlgorithmConfig(Section):
    """The parts of an algorithm, in the order in which they act; `configs/algorithm/` holds the presets.

    Whatever is chosen, log-ratios are clamped to ± 20 before exponentiation: a token's in objectives and token
    corrections, a row's sum or mean in sequence ones. Knobs beyond e^± 20 have no effect.
    """

    name: str = "grpo"
    shaping: tuple[Shaping, ...] = ()
    """Changes to the scores."""
    filters: tuple[Filter, ...] = ()
    """Which episodes are trained on, judged by their scores; the others still count in their group's statistics."""
    refill: DynamicSamplingConfig = DynamicSamplingConfig()
    advantage: Advantage = ADVANTAGES.check("group-relative")
    critic: CriticConfig = CriticConfig()
    vine: StateValueConfig = StateValueConfig()
    proximal: Literal["rollout", "recompute"] = "rollout"
    """What `old` is: the rollout's log-probabilities (bypass), or those of a forward pass before the first update."""
    weight: Weight = WEIGHTS.check("none")
    """Correction by old/mu: what each token's loss is multiplied with."""
    rejection: Rejection = REJECTIONS.check("none")
    """Correction by old/mu: which tokens are left out. It acts after the advantages: no reward is lost with them."""
    routing: RoutingConfig = RoutingConfig()
    denominators: Literal["original", "kept"] = "original"
    """Whether rejected tokens still count in the denominators."""
    objective: Objective = OBJECTIVES.check({"name": "ppo-clip", "clip_high_eps": 0.28})
    negative_mask: NegativeMask = NEGATIVE_MASKS.check("none")
    """Which rows with a negative advantage the objective leaves out, by theta/mu; penalties still apply to them."""
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
        if self.objective["name"] == "dpo" and (problem := _dpo_problem(self)):
            raise ValueError(f"objective=dpo {problem}")
        if self.shaping and self.advantage["name"] == "over-greedy":
            raise ValueError(
                "shaping would change the scores but not those of the greedy episodes they are compared with"
            )
        advantage, where = self.advantage["name"], self.critic.where
        if advantage in WITH_CRITIC and where == "none":
            raise ValueError(
                f"advantage={advantage} is taken over a critic's values: set critic.where=shared or separate"
            )
        if advantage not in WITH_CRITIC and where != "none":
            raise ValueError(
                f"advantage={advantage} asks no critic, critic.where={where} would train one in vain: set "
                f"critic.where=none, or advantage={' or '.join(WITH_CRITIC)}"
            )
        if advantage == "optimal-baseline" and self.proximal == "rollout":
            raise ValueError(
                "advantage=optimal-baseline weighs by the distributions that tokens came from, which only a forward "
                "pass knows: set proximal=recompute"
            )
        self._check_vine()
        corrected = self.weight["name"] != "none" or self.rejection["name"] != "none"
        if corrected and self.proximal == "rollout":
            raise ValueError(
                "a correction by old/mu has no effect with proximal=rollout, where old is mu: set proximal=recompute"
            )
        if self.proximal == "rollout" and (self.routing.replay == "R2" or self.routing.min_agreement):
            knob = "replay=R2" if self.routing.replay == "R2" else "min_agreement"
            raise ValueError(
                f"routing.{knob} needs the routes of old's forward pass, and there is none with proximal=rollout: "
                "set proximal=recompute"
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

    def _check_vine(self) -> None:
        most, each = self.vine.max_episodes, self.vine.continuations
        if self.advantage["name"] != "state-values":
            if most:
                raise ValueError(
                    f"vine.max_episodes={most} values states for advantage=state-values only: leave it out"
                )
            return
        if most < each:
            raise ValueError(
                f"advantage=state-values runs vine.continuations={each} episodes per state; vine.max_episodes={most} "
                f"lets it value none: set it to {each} times the states of a step, or to what you can spare"
            )
        if self.shaping or self.kl.where == "reward":
            raise ValueError(
                "shaping and kl.where=reward would change the scores but not the values that continuations measure; "
                "put the KL penalty in the loss"
            )


def _dpo_problem(config: AlgorithmConfig) -> str | None:
    """Say what doesn't go with DPO, and why."""
    if config.advantage["name"] != "best-against-worst":
        return "learns from pairs, a better episode and a worse one: set advantage=best-against-worst"
    if config.aggregation["name"] != "token-sum":
        return "is a mean over pairs, not over tokens or rows, and takes it itself: set aggregation=token-sum"
    if config.proximal != "rollout" or config.weight["name"] != "none" or config.rejection["name"] != "none":
        return "learns from pairs whoever sampled them: set proximal=rollout, weight=none and rejection=none"
    if config.kl.where != "none":
        return "is held to the start of the run already, by its knob beta: set kl.where=none"
    if config.entropy:
        return "has no entropy bonus: its tokens may be another policy's, not samples of theta: set entropy=0"
    return None
