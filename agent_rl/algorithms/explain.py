"""What an algorithm does, in words: its formula in one line, and every part with its knobs and its source."""

from __future__ import annotations

from torch import Tensor

from agent_rl.algorithms.advantages.choices import ADVANTAGES
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.algorithms.choice import Choice, Chosen
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.corrections import REJECTIONS, WEIGHTS
from agent_rl.algorithms.objectives.base import TokenLoss
from agent_rl.algorithms.objectives.choices import OBJECTIVES
from agent_rl.algorithms.routing import RoutingConfig
from agent_rl.algorithms.selection import FILTERS, SHAPING


def formula(config: AlgorithmConfig) -> str:
    """Return the algorithm in one line: advantage, correction, objective, aggregation."""
    return "; ".join(choice.formula for _, choice, chosen in _parts(config) if chosen["name"] != "none")


def explain(config: AlgorithmConfig) -> str:
    """Return the composed formula, each part with its knobs' values and its source."""
    old = "mu itself" if config.proximal == "rollout" else "recomputed before the first update"
    lines = [f"{config.name}: mu sampled the tokens, old is {old}, theta is trained."]
    for part, choice, chosen in _parts(config):
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
    lines += _routing(config.routing)
    zero = "count" if config.count_zero_advantage else "don't count"
    lines.append(f"  {'denominators':12} {config.denominators}; rows of advantage 0 {zero}")
    return "\n".join(lines)


def _routing(routing: RoutingConfig) -> list[str]:
    """What is done about the routes of a mixture of experts."""
    replayed = {
        "R2": "R2: the update takes the experts of old's forward pass   -- GSPO sec. 5.3, Zheng et al. 2025",
        "R3": "R3: old's forward pass and the update take the rollout's experts   -- Ma et al. 2025, arXiv:2510.11370",
    }
    lines = [f"  {'routing':12} {replayed[routing.replay]}"] if routing.replay != "none" else []
    if routing.min_agreement:
        below = f"tokens weigh 0 where less than {routing.min_agreement:g} of the layers took mu's experts in old"
        lines.append(f"  {'routing':12} {below}")
    return lines


def _parts(config: AlgorithmConfig) -> list[tuple[str, Choice[Tensor] | Choice[TokenLoss], Chosen]]:
    return [
        *(("shaping", SHAPING[c], c) for c in config.shaping),
        *(("filter", FILTERS[c], c) for c in config.filters),
        ("advantage", ADVANTAGES[config.advantage], config.advantage),
        ("weight", WEIGHTS[config.weight], config.weight),
        ("rejection", REJECTIONS[config.rejection], config.rejection),
        ("objective", OBJECTIVES[config.objective], config.objective),
        ("aggregation", AGGREGATIONS[config.aggregation], config.aggregation),
    ]
