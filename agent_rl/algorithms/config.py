"""The settings of an algorithm: one named choice for each part, and what makes no sense together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from agent_rl.algorithms import aggregation, components, corrections, filters, shaping  # noqa: F401 - they register
from agent_rl.algorithms.advantages import critic, episode, token, turn  # noqa: F401 - the same
from agent_rl.algorithms.components import Component, ComponentConfig
from agent_rl.algorithms.objectives import pairwise, sequence  # noqa: F401 - the same
from agent_rl.algorithms.sections import CriticConfig, DynamicSamplingConfig, EndingsConfig, KLConfig
from agent_rl.algorithms.state_values import StateValueConfig
from agent_rl.config import Section
from agent_rl.moe.agreement import RoutingConfig

R = TypeVar("R")

Shaping = Annotated[ComponentConfig, BeforeValidator(components.shaping.check), components.shaping]
Filter = Annotated[ComponentConfig, BeforeValidator(components.filter.check), components.filter]
Advantage = Annotated[ComponentConfig, BeforeValidator(components.advantage.check), components.advantage]
Weight = Annotated[ComponentConfig | None, BeforeValidator(components.weight.check), components.weight]
Rejection = Annotated[ComponentConfig, BeforeValidator(components.rejection.check)]
Objective = Annotated[ComponentConfig, BeforeValidator(components.objective.check), components.objective]
NegativeMask = Annotated[
    ComponentConfig | None, BeforeValidator(components.negative_mask.check), components.negative_mask
]
Aggregation = Annotated[ComponentConfig, BeforeValidator(components.aggregation.check), components.aggregation]


def _listed(given: object) -> object:
    """Return one choice, or none, as a list."""
    if given is None or given == "none":
        return ()
    return (given,) if isinstance(given, str | Mapping) else given


ONLY_WEIGH = frozenset({"ppo-clip", "cispo", "minirl", "sapo", "token-tis", "sequence-tis", "geometric-tis", "token"})
"""Objectives, weights and rejections that leave most of an episode in, however far the policy has moved away from it:
on tokens of four updates ago they fell on one seed of three or more (BENCHMARKS.md, Staleness)."""


class AlgorithmConfig(Section):
    """The parts of an algorithm, in the order in which they act; `configs/algorithm/` holds the presets.

    Whatever is chosen, log-ratios are clamped to ± 20 before exponentiation: a token's in objectives and token
    corrections, a row's sum or mean in sequence ones. Knobs beyond e^± 20 have no effect.
    """

    name: str = "grpo"
    """What the run calls it; the parts below decide what it does."""
    shaping: tuple[Shaping, ...] = ()
    """Changes to the scores."""
    filters: tuple[Filter, ...] = ()
    """Which episodes are trained on, judged by their scores; the others still count in their group's statistics."""
    endings: EndingsConfig = EndingsConfig()
    """What is learned from episodes that were cut."""
    refill: DynamicSamplingConfig = DynamicSamplingConfig()
    advantage: Advantage = Field("group-relative", validate_default=True)
    """How much better than expected an episode, a turn or a token was."""
    critic: CriticConfig = CriticConfig()
    vine: StateValueConfig = StateValueConfig()
    proximal: Literal["auto", "rollout", "recompute"] = "auto"
    """What `old` is: the rollout's log-probabilities (bypass), or those of a forward pass before the first update.
    `auto` recomputes them where a part needs it, and where what samples is another engine or format than what is
    trained, if a part reads them: taken for old, another engine's errors are learned from as if the policy had moved.
    Earlier weights of the same engine are no error: against their log-probabilities the clip sees how far the policy
    has moved since, and against a recomputed old it would not."""
    weight: Weight = None
    """Correction by old/mu: what each token's loss is multiplied with."""
    rejection: Annotated[tuple[Rejection, ...], BeforeValidator(_listed), components.rejection] = ()
    """Correction by old/mu: which tokens are left out; of several, each judges all sampled tokens, and what one rejects
    is gone. They act after the advantages: no reward is lost with a token."""
    routing: RoutingConfig = RoutingConfig()
    denominators: Literal["original", "kept"] = "original"
    """Whether rejected tokens still count in the denominators."""
    objective: Objective = Field({"name": "ppo-clip", "clip_high_eps": 0.28}, validate_default=True)
    """The loss of each token, of its advantage and log-probabilities."""
    negative_mask: NegativeMask = None
    """Which episodes with a negative advantage the objective leaves out, by theta/mu; penalties still apply to them."""
    aggregation: Aggregation = Field("token-mean", validate_default=True)
    """How the losses of a batch's tokens become one number."""
    kl: KLConfig = KLConfig()
    entropy: float = Field(0.0, ge=0)
    """The loss is lowered by this times the mean entropy of the sampled tokens' distributions, in nats."""
    count_zero_advantage: bool = True
    """Whether groups of advantage 0, whose rows are dropped as they have no gradient, still count in the denominators.
    Counted, they make steps smaller the fewer groups are left to learn from, which keeps the end of a run calm; DAPO
    does not count them, as it samples until the batch is full."""

    @property
    def recomputes_old(self) -> bool:
        """Whether old is a forward pass; with `proximal=auto`, on tokens that the trainer itself sampled."""
        return self.proximal == "recompute" or (self.proximal == "auto" and _needs_old(self) is not None)

    @property
    def learns_from_pairs(self) -> bool:
        """Whether the objective learns from pairs of episodes."""
        return "sides" in components.objective[self.objective].reads

    @property
    def learns_from_any_policy(self) -> bool:
        """Whether it does not matter to the objective who sampled the tokens, so that it can learn from stored ones."""
        sampled_by = {"old_logprobs", "rollout_logprobs"}
        return self.learns_from_pairs or not sampled_by & set(components.objective[self.objective].reads)

    @property
    def drifted(self) -> Literal["left out", "weighed", "taken for fresh"]:
        """What becomes of tokens that the policy has moved away from since they were sampled."""
        reads = {*components.objective[self.objective].reads}
        is_bound = "old_logprobs" in reads and not self.recomputes_old  # old is mu
        parts = [self.weight, *self.rejection, self.negative_mask]
        if (is_bound and self.objective["name"] != "reinforce") or "rollout_logprobs" in reads:
            parts.append(self.objective)
        by_mu = {str(part["name"]) for part in parts if part}
        if by_mu - ONLY_WEIGH or self.learns_from_any_policy:
            return "left out"
        return "weighed" if by_mu else "taken for fresh"

    def sampled_elsewhere(self) -> AlgorithmConfig:
        """Return the settings for tokens that another engine or format than the trainer's sampled."""
        reads = {*components.objective[self.objective].reads}
        reads |= {*components.negative_mask[self.negative_mask].reads} if self.negative_mask else set()
        uses = "old_logprobs" in reads and not self.learns_from_pairs
        return self.model_copy(update={"proximal": "recompute"}) if self.proximal == "auto" and uses else self

    def within(self, context: int | None) -> AlgorithmConfig:
        """Return the settings for a run with a context of so many tokens, the `max_length` of shaping that has none."""
        open_ended = any("max_length" in chosen and chosen["max_length"] is None for chosen in self.shaping)
        if context is None or not open_ended:
            return self
        known: ComponentConfig = {"max_length": context}
        filled = tuple(c | known if c.get("max_length", 0) is None else c for c in self.shaping)
        return self.model_copy(update={"shaping": filled})

    @model_validator(mode="after")
    def _meaningful(self) -> AlgorithmConfig:
        if problem := next(_problems(self), None):
            raise ValueError(problem)
        return self


# What makes no sense together; each yields what is wrong and what to set


def _problems(config: AlgorithmConfig) -> Iterator[str]:
    yield from (f"objective={config.objective['name']} {problem}" for problem in _pair_problems(config))
    yield from _advantage_problems(config)
    yield from _state_value_problems(config)
    yield from _proximal_problems(config)
    yield from _denominator_problems(config)


def _pair_problems(config: AlgorithmConfig) -> Iterator[str]:
    """A pairwise objective reads the sides of pairs and the reference; nothing about who sampled them."""
    if not config.learns_from_pairs:
        return
    if components.advantage[config.advantage].returns != "PairSides":
        pairing = _names(components.advantage, lambda c: c.returns == "PairSides")
        yield f"learns from pairs, a better episode and a worse one: set advantage={pairing}"
    if {"whole", "prompt_shares"} & set(components.aggregation[config.aggregation].reads):
        plain = _names(components.aggregation, lambda c: not {"whole", "prompt_shares"} & set(c.reads))
        yield f"is a mean over pairs, not over tokens or rows, and takes it itself: set aggregation={plain}"
    if config.proximal == "recompute" or config.weight or config.rejection:
        yield "learns from pairs of any policy: set proximal=auto, weight=none and rejection=none"
    if config.kl.where != "none":
        yield "is held to the start of the run already, by its knob beta: set kl.where=none"
    if config.entropy:
        yield "has no entropy bonus: its tokens may be another policy's, not samples of theta: set entropy=0"


def _advantage_problems(config: AlgorithmConfig) -> Iterator[str]:
    name, reads = config.advantage["name"], components.advantage[config.advantage].reads
    changes = [
        what for what, on in (("shaping", config.shaping), ("kl.where=reward", config.kl.where == "reward")) if on
    ]
    if changes and "baselines" in reads:
        yield (
            f"{changes[0]} would change the scores but not those of the greedy episodes that advantage={name} compares "
            "them with: leave it out" + (", or set kl.where=loss" if config.kl.where == "reward" else "")
        )
    if changes and "components" in reads and not {"scores", "rewards", "turn_rewards"} & set(reads):
        yield (
            f"{changes[0]} changes the total of the rewards, and advantage={name} reads their components: leave it out"
            + (", or set kl.where=loss" if config.kl.where == "reward" else ", or make it a reward of the environment")
        )
    if config.kl.where == "reward" and name == "ones":
        yield "kl.where=reward changes the rewards, and advantage=ones is 1 whatever they are: set kl.where=loss"
    if config.negative_mask and name == "ones":
        yield (
            f"negative_mask={config.negative_mask['name']} leaves out tokens of negative advantage, and advantage=ones "
            "has none: set negative_mask=none"
        )
    eps, usual = config.advantage.get("eps"), components.advantage[config.advantage].knobs.model_fields.get("eps")
    if config.advantage.get("std") is False and usual and eps != usual.default:
        yield f"eps={eps} is added to the deviation, and advantage={name} divides by none without std: set std=true"
    if "values" in reads and config.critic.where == "none":
        yield f"advantage={name} is taken over a critic's values: set critic.where=shared or separate"
    if "values" in reads and components.advantage[config.advantage].returns in ("Tensor", "TurnAdvantages"):
        yield (
            f"advantage={name} reads the critic's values but returns no targets for it, so that it would never learn: "
            "let it return an AdvantageEstimate"
        )
    if "values" not in reads and config.critic.where != "none":
        yield (
            f"advantage={name} asks no critic, critic.where={config.critic.where} would train one in vain: set "
            f"critic.where=none, or advantage={_names(components.advantage, lambda c: 'values' in c.reads)}"
        )


def _state_value_problems(config: AlgorithmConfig) -> Iterator[str]:
    name, most, each = config.advantage["name"], config.vine.max_episodes, config.vine.continuations
    if "state_values" not in components.advantage[config.advantage].reads:
        reading = _names(components.advantage, lambda c: "state_values" in c.reads)
        if most:
            yield f"vine.max_episodes={most} values states for advantage={reading} only: leave it out"
        return
    if most < each:
        yield (
            f"advantage={name} runs vine.continuations={each} episodes per state; vine.max_episodes={most} lets it "
            f"value none: set it to {each} times the states of a step, or to what you can spare"
        )
    if config.shaping or config.kl.where == "reward":
        yield (
            "shaping and kl.where=reward would change the scores but not the values that continuations measure; put "
            "the KL penalty in the loss"
        )


def _needs_old(config: AlgorithmConfig) -> str | None:
    """Say which part needs old's forward pass, whatever sampled the tokens."""
    if config.weight or config.rejection:
        return "a correction by old/mu has no effect with proximal=rollout, where old is mu"
    knobs = {"replay=R2": config.routing.replay == "R2", "min_agreement": config.routing.min_agreement > 0}
    if knob := next((name for name, is_set in knobs.items() if is_set), None):
        return f"routing.{knob} needs the routes of old's forward pass"
    if "sum_pi_squared" in components.advantage[config.advantage].reads:
        name = config.advantage["name"]
        return f"advantage={name} weighs by the distributions that tokens came from, which only a forward pass knows"
    return None


def _proximal_problems(config: AlgorithmConfig) -> Iterator[str]:
    if config.proximal == "rollout" and (why := _needs_old(config)):
        yield f"{why}: set proximal=auto or recompute"
    if config.weight and "rollout_logprobs" in components.objective[config.objective].reads:
        yield (
            f"objective={config.objective['name']} already weighs tokens by theta/mu; weight={config.weight['name']} "
            "would do it twice: set weight=none"
        )


def _denominator_problems(config: AlgorithmConfig) -> Iterator[str]:
    if config.refill.max_rounds > 1 and not config.filters:
        yield "refill.max_rounds makes up for what filters leave out; there are none: set filters"
    if config.denominators == "kept" and not config.rejection:
        yield "denominators=kept needs a rejection; without one every token is kept"


def _names(registry: components.ComponentRegistry[R], wanted: Callable[[Component[R]], bool]) -> str:
    """Return the names of some components, for people."""
    return " or ".join(name for name in registry if wanted(registry[name]))
