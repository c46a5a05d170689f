"""What an algorithm does, in words: its formula in one line, and every part with its knobs and its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agent_rl.algorithms import components
from agent_rl.algorithms.components import Component, ComponentConfig
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.requirements import Requirements
from agent_rl.algorithms.sections import CriticConfig
from agent_rl.moe.agreement import RoutingConfig


def formula(config: AlgorithmConfig) -> str:
    """Return the algorithm in one line: advantage, correction, objective, aggregation."""
    return "; ".join(component.formula for _, component, _ in _parts(config))


def explain(config: AlgorithmConfig) -> str:
    """Return the composed formula, each part with its knobs' values and its source."""
    old = "recomputed before the first update" if config.recomputes_old else "mu itself"
    if config.proximal == "auto" and not config.recomputes_old:
        old += " (recomputed where what samples is not what trains)"
    lines = [f"{config.name}: mu sampled the tokens, old is {old}, theta is trained."]
    for part, component, chosen in _parts(config):
        knobs = ", ".join(f"{k}={v}" for k, v in chosen.items() if k != "name")
        lines.append(_row(part, str(chosen["name"]) + (f" ({knobs})" if knobs else "")))
        lines.append(_row("", f"  {component.formula}" + (f"   -- {component.source}" if component.source else "")))
        if part == "advantage":
            lines += _critic(config.critic)
    return "\n".join((*lines, *_sampling(config), *_terms(config), *_routing(config.routing), *_updates(config)))


def _row(part: str, text: str) -> str:
    return f"  {part:13} {text}"


def _sampling(config: AlgorithmConfig) -> Iterator[str]:
    """Yield which episodes are sampled beyond a batch."""
    if config.vine.max_episodes:
        states = f"{config.vine.continuations} continuations a state, at most {config.vine.max_episodes} a step"
        yield _row("vine", f"{states}; a state without a value is no boundary between turns")
    if config.refill.max_rounds > 1:
        rounds = f"at most {config.refill.max_rounds} rounds of {config.refill.oversampling} batches"
        yield _row("refill", f"until the filters have kept a full batch; {rounds}")


def _terms(config: AlgorithmConfig) -> Iterator[str]:
    """Yield what the loss has beside the objective, and what has to be computed first."""
    if config.kl.where != "none":
        kl = f"{config.kl.coefficient} * KL(theta || start of the run), estimated by {config.kl.kind}"
        yield _row("kl", f"{kl}, is {'added to the loss' if config.kl.where == 'loss' else 'taken from the reward'}")
    if config.entropy:
        yield _row("entropy", f"{config.entropy} times the mean entropy is taken from the loss")
    needs = Requirements(config)
    if needs.needs_reference and config.kl.where == "none":
        yield _row("reference", "the weights that the run started from")
    if needs.needs_scores_before_update:
        yield _row("before each", "update, theta scores the whole batch, which the objective needs")


def _updates(config: AlgorithmConfig) -> Iterator[str]:
    """Yield how many updates a batch gets, and what each divides its sums by."""
    base = config.name.removesuffix("-paper")
    if (stated := UPDATES_OF_SOURCES.get(base)) and base == config.name:
        yield _row("updates", f"1 a step unless `updates` asks for more; the source takes {stated}")
    elif stated:
        yield _row("updates", f"{stated}; `updates` can ask for fewer")
    zero = "count" if config.count_zero_advantage else "don't count"
    yield _row("denominators", f"{config.denominators}; rows of advantage 0 {zero}")


UPDATES_OF_SOURCES = {
    "cispo": "16   -- MiniMax-M1 2025, sec. 3.1",
    "dapo": "16, a mini-batch each   -- Yu et al. 2025, sec. 4.1",
    "dr_grpo": "8, a mini-batch each   -- the authors' scripts",
    "gdpo": "4, a mini-batch each   -- the authors' script",
    "gspo": "4, a mini-batch each   -- Zheng et al. 2025, sec. 5.1",
    "m2po": "4, a mini-batch each   -- the authors' script",
    "ppo": "320, 10 epochs of 32 mini-batches   -- Schulman et al. 2017, table 3",
    "reinforce_pp": "8, a mini-batch each   -- OpenRLHF's defaults",
    "vineppo": "8, a mini-batch each   -- the authors' configuration",
}
"""How many updates a batch gets in the source of a preset, where that is more than one."""


def _routing(routing: RoutingConfig) -> Iterator[str]:
    """Yield what is done about the routes of a mixture of experts."""
    replayed = {
        "R2": "R2: the update takes the experts of old's forward pass   -- GSPO sec. 5.3, Zheng et al. 2025",
        "R3": "R3: old's forward pass and the update take the rollout's experts   -- Ma et al. 2025, arXiv:2510.11370",
    }
    if routing.replay != "none":
        yield _row("routing", replayed[routing.replay])
    if routing.min_agreement:
        below = f"tokens weigh 0 where less than {routing.min_agreement:g} of the layers took mu's experts in old"
        yield _row("routing", below)


def _critic(config: CriticConfig) -> Iterator[str]:
    """Yield what the critic and its loss are."""
    if config.where == "none":
        return
    kinds = {"shared": "a head on the policy's trunk", "separate": "a copy of the first policy, with a head"}
    knobs = f"coefficient={config.coefficient}, clip_eps={config.clip_eps}, lr={config.lr}"
    loss = "L_V = coefficient (V - R)^2 / 2, R = A (not whitened) + V_old"
    if config.clip_eps is not None:
        loss = "L_V = coefficient max((V - R)^2, (clip(V, V_old +- clip_eps) - R)^2) / 2, R = A (not whitened) + V_old"
    yield _row("critic", f"{config.where} ({knobs}): {kinds[config.where]}")
    yield _row("", f"  {loss}; mean over the tokens that it values")
    if config.warmup_steps:
        yield _row("", f"  in the first {config.warmup_steps} steps only the critic learns")


KINDS: dict[str, components.ComponentRegistry[Any]] = {
    "shaping": components.shaping,
    "filter": components.filter,
    "advantage": components.advantage,
    "weight": components.weight,
    "rejection": components.rejection,
    "objective": components.objective,
    "negative mask": components.negative_mask,
    "aggregation": components.aggregation,
}
"""The kinds of components, in the order in which they act."""


def _parts(config: AlgorithmConfig) -> list[tuple[str, Component[Any], ComponentConfig]]:
    """The kind, component and choice of every part that the config has."""
    chosen = {kind: getattr(config, kind.replace(" ", "_"), None) for kind in KINDS} | {"filter": config.filters}
    listed = {kind: value if isinstance(value, tuple) else (value,) for kind, value in chosen.items()}
    return [(kind, registry[c], c) for kind, registry in KINDS.items() for c in listed[kind] if c]
