"""Shaping and filters as choices of a config: functions of an `Experience` that return scores or a mask, `[E]`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agent_rl.algorithms import filters, shaping
from agent_rl.algorithms.components import Component, ComponentRegistry, Count, Fraction, Positive
from agent_rl.algorithms.experience import Experience
from agent_rl.errors import ConfigError, did_you_mean

Target = Count | str
"""A length in tokens, or the key under which each task has its own."""


def soft_overlong(x: Experience, *, max_length: Count, buffer: Count, penalty: Positive = 1.0) -> Tensor:
    """DAPO's penalty for the last stretch before the limit."""
    return shaping.soft_overlong(x.scores, x.lengths, max_length=max_length, buffer=buffer, penalty=penalty)


def length_l1(x: Experience, *, target: Target, alpha: Positive = 3e-4) -> Tensor:
    """L1-Exact: charge for every token more or less than was asked for."""
    return shaping.length_l1(x.scores, x.lengths, _targets(x, target), alpha=alpha)


def length_l1_max(x: Experience, *, target: Target, alpha: Positive = 3e-4, delta: Fraction = 0.5) -> Tensor:
    """L1-Max: a success counts less the closer it comes to the length that was allowed, and beyond."""
    return shaping.length_l1_max(x.scores, x.lengths, _targets(x, target), alpha=alpha, delta=delta)


def length_group(x: Experience, *, coefficient: Positive, correct: float = 1.0) -> Tensor:
    """Reward being shorter than the rest of the group."""
    return shaping.length_group(x.scores, x.lengths, x.groups, coefficient=coefficient, correct=correct)


def relative_cost(x: Experience, *, coefficient: Positive, gated: bool = False) -> Tensor:
    """Charge for length, in proportion to how well the group does."""
    return shaping.relative_cost(x.scores, x.lengths, x.groups, coefficient=coefficient, gated=gated)


def clip(x: Experience, *, low: float, high: float) -> Tensor:
    """Clip the scores."""
    return shaping.clip(x.scores, low=low, high=high)


def scale(x: Experience, *, factor: float, shift: float = 0.0) -> Tensor:
    """Scale and shift the scores."""
    return shaping.scale(x.scores, factor=factor, shift=shift)


def format_gate(x: Experience, *, component: str, value: float = 0.0) -> Tensor:
    """Give `value` to episodes whose format is not met."""
    if component not in x.names:
        hint = did_you_mean(component, x.names)
        raise ConfigError(f"format-gate: no reward component '{component}'.{hint} There are: {', '.join(x.names)}")
    return shaping.format_gate(x.scores, x.components[:, x.names.index(component)], value=value)


def varied_groups(x: Experience) -> Tensor:
    """Keep groups whose scores differ."""
    return filters.varied_groups(x.scores, x.groups)


def not_overlong(x: Experience) -> Tensor:
    """Leave out episodes that a limit on tokens cut short."""
    return filters.not_overlong(x.cut_short)


def max_staleness(x: Experience, *, steps: Count) -> Tensor:
    """Leave out episodes with a token more than `steps` versions older than the newest of the batch."""
    if x.batch is None:
        return torch.ones_like(x.kept)
    versions, sampled = x.batch.versions, x.batch.loss_mask
    newest = int(versions.max())
    oldest = torch.full_like(x.groups, newest)
    by_row = torch.where(sampled, versions, newest).amin(-1)
    oldest.scatter_reduce_(0, x.batch.episode, by_row, "amin")
    return filters.on_policy(oldest, newest, max_staleness=steps)


def _targets(x: Experience, target: int | str) -> Tensor:
    """Return the length that each episode was to have, float64 `[E]`; NaN where its task asks for none."""
    if isinstance(target, int):
        return torch.full_like(x.scores, target)
    for task in x.tasks:
        value = task.get(target, "missing")
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            found = f"is {value!r}" if target in task else f"is none of {', '.join(task) or 'no keys'}"
            raise ConfigError(
                f"length target '{target}' {found} in task {dict(task)}: give each task a number of tokens under that "
                "key (null where it asks for no length), or set target to a number for all"
            )
    return torch.tensor([math.nan if (n := task[target]) is None else n for task in x.tasks], dtype=torch.float64)


SHAPING = ComponentRegistry(
    "shaping",
    {
        "soft-overlong": Component(
            soft_overlong, "R -= penalty * clip((|y| - max_length + buffer) / buffer, 0, 1)", "DAPO, eq. 13"
        ),
        "length-l1": Component(
            length_l1, "R -= alpha * |target - |y||", "L1-Exact, Aggarwal & Welleck 2025, 2503.04697, eq. 1"
        ),
        "length-l1-max": Component(
            length_l1_max, "R *= clip(alpha * (target - |y|) + delta, 0, 1) where R > 0", "L1-Max, the same, eq. 2"
        ),
        "length-group": Component(
            length_group, "R += coefficient * (1/2 - (|y| - min_group) / (max_group - min_group))", "Kimi k1.5, 2.3.3"
        ),
        "relative-cost": Component(relative_cost, "R -= coefficient * mean_group * |y| / max_group |y|", "prime-rl"),
        "clip": Component(clip, "R = clip(R, low, high)", ""),
        "scale": Component(scale, "R = factor * R + shift", ""),
        "format-gate": Component(format_gate, "R = value where the component is below 1", ""),
    },
)

FILTERS = ComponentRegistry(
    "filter",
    {
        "varied-groups": Component(varied_groups, "groups with max R - min R > 1e-6", "DAPO, dynamic sampling"),
        "not-overlong": Component(not_overlong, "episodes that no token limit cut short", "DAPO, overlong filtering"),
        "max-staleness": Component(
            max_staleness, "episodes with no token older than `steps` versions", "AReaL, prime-rl"
        ),
    },
)
