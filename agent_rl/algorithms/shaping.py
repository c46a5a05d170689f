"""Reward shaping: what is done to the scores of episodes before advantages are computed from them.

Every function takes scores `[E]` and returns float64 `[E]`. NaN means not scored: it stays NaN and takes no part in any
group's statistics; other arguments `[E]` may hold anything there. `groups` are int64 ids. Lengths count sampled tokens,
unless the caller wants to shape by something else, e.g. turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_rl.algorithms.components import Bound, Count, Fraction, Positive, shaping
from agent_rl.algorithms.group_stats import group_count, group_index, group_range, group_sum
from agent_rl.core.episode import ROUNDING
from agent_rl.core.messages import Task
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Target = Count | str
"""A length in tokens, or the key under which each task has its own."""


@shaping(
    "soft-overlong",
    formula="R -= penalty * clip((|y| - max_length + buffer) / buffer, 0, 1)",
    source="DAPO, eq. 13",
)
def soft_overlong(
    scores: Tensor,
    lengths: Tensor,
    *,
    max_length: Count | None = None,
    buffer: Count | None = None,
    penalty: Positive = 1.0,
) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13): long episodes lose up to `penalty`.

    Nothing up to `max_length - buffer`, then linearly more, `penalty` at `max_length` and beyond; the paper's buffer is
    4096 of 20480, 0 makes a step after `max_length`, None is a quarter. In a run, `max_length` None is its context; by
    itself it is no limit (`AlgorithmConfig.within`). verl's is linear beyond `max_length`, which its responses can't
    reach; multi-turn episodes can. TRL is as here.

    Raises:
        ConfigError: if `buffer` is not in `0..max_length`.
    """
    if max_length is None:
        return scores.double()
    buffer = max_length // 4 if buffer is None else buffer
    if not 0 <= buffer <= max_length:
        raise ConfigError(f"buffer={buffer} must be between 0 and max_length={max_length}: it is the end of that range")
    over = _beside(scores, lengths) - (max_length - buffer)
    share = (over / buffer).clamp(0, 1) if buffer else (over > 0).double()
    return scores.double() - penalty * share


@shaping(
    "length-l1", formula="R -= alpha * |target - |y||", source="L1-Exact, Aggarwal & Welleck 2025, 2503.04697, eq. 1"
)
def length_l1(
    scores: Tensor, lengths: Tensor, tasks: Sequence[Task], *, target: Target, alpha: Positive = 3e-4
) -> Tensor:
    """L1-Exact: `score - alpha |target - length|` (Aggarwal & Welleck 2025, arXiv 2503.04697, eq. 1).

    Additive: a wrong answer of the right length may beat a right one of a wrong length. Scores are 1 for correct and 0
    for wrong in the paper. A task without a target leaves the score as is.

    Raises:
        ConfigError: if a target is negative, the authors' code for "no target" and "at most".
    """
    targets = _targets(scores, tasks, target)
    off = (targets - _beside(scores, lengths)).abs()
    return scores.double() - alpha * torch.where(targets.isnan(), 0.0, off)


@shaping(
    "length-l1-max",
    formula="R *= clip(alpha * (target - |y|) + delta, 0, 1) where R > 0",
    source="L1-Max, the same, eq. 2",
)
def length_l1_max(
    scores: Tensor,
    lengths: Tensor,
    tasks: Sequence[Task],
    *,
    target: Target,
    alpha: Positive = 3e-4,
    delta: Fraction = 0.5,
) -> Tensor:
    """L1-Max: `score * clip(alpha (target - length) + delta, 0, 1)` (Aggarwal & Welleck 2025, eq. 2).

    An episode that is exactly as long as was allowed keeps `delta` of its score. The paper's score is 1 for correct and
    0 for wrong. A score below 0 is left as is, since the product would reward it for being overlong. The authors' code
    has an alpha of 1/1000. Targets are those of `length_l1`.
    """
    targets = _targets(scores, tasks, target)
    factor = (alpha * (targets - _beside(scores, lengths)) + delta).clamp(0, 1)
    scores = scores.double()
    return torch.where(targets.isnan() | ~(scores > 0), scores, scores * factor)


@shaping(
    "length-group",
    formula="R += coefficient * (1/2 - (|y| - min_group) / (max_group - min_group))",
    source="Kimi k1.5, 2.3.3",
)
def length_group(
    scores: Tensor, lengths: Tensor, groups: Tensor, *, coefficient: Positive, correct: float = 1.0
) -> Tensor:
    """Length reward relative to the group (Kimi k1.5, Kimi Team 2025, section 2.3.3).

    `lambda = 0.5 - (length - shortest) / (longest - shortest)` is added, times `coefficient`; where the score is below
    `correct`, only if it is negative. So among correct episodes the shorter ones gain and the longer ones lose, and
    long wrong ones lose. Shortest and longest are of all scored episodes of the group, right or wrong; where they are
    equal nothing is added. The report warms it up: off at first, then with a constant coefficient. open-r1's
    `len_reward` takes shortest and longest over the whole call, not the group, in characters.
    """
    scores = scores.double()
    lengths = _beside(scores, lengths)
    shortest, longest = group_range(_only_scored(lengths, scores), group_index(groups, scores))
    spread = longest - shortest
    reward = 0.5 - (lengths - shortest) / torch.where(spread > 0, spread, 1.0)
    reward = torch.where(scores >= correct - ROUNDING, reward, reward.clamp(max=0))
    return scores + coefficient * torch.where(spread > 0, reward, 0.0)


@shaping("relative-cost", formula="R -= coefficient * mean_group * |y| / max_group |y|", source="prime-rl")
def relative_cost(
    scores: Tensor, lengths: Tensor, groups: Tensor, *, coefficient: Positive, gated: bool = False
) -> Tensor:
    """Penalty on a cost, by how well the group does (prime-rl's linear length penalty, prime-rl#2901).

    `score - coefficient * mean score of the group * cost / highest cost of the group`: the more often a task is solved,
    the more it matters to solve it cheaply; a group that never solves it pays nothing. Meant for scores from 0 to 1: a
    mean or a score below 0 counts as 0, or long would be good. `gated` multiplies the penalty with the episode's own
    score too, so that wrong episodes pay nothing. For several costs (prime-rl has sampled tokens .25, context tokens
    .1, turns .1) add up the differences to the unshaped scores, not one after the other; prime-rl divides both kinds of
    tokens by the highest total.
    """
    scores = scores.double()
    costs = _beside(scores, lengths)
    index = group_index(groups, scores)
    _, highest = group_range(_only_scored(costs, scores), index)
    mean = (group_sum(scores, index) / group_count(scores, index).clamp(min=1)).clamp(min=0)
    share = torch.where(highest > 0, costs / torch.where(highest > 0, highest, 1.0), 0.0)
    penalty = coefficient * mean * share
    return scores - (penalty * scores.clamp(min=0) if gated else penalty)


@shaping("clip", formula="R = clip(R, low, high)")
def clip(scores: Tensor, *, low: Bound, high: Bound) -> Tensor:
    """Clip scores to `[low, high]`; -inf and inf for no bound.

    Raises:
        ConfigError: if `low` is above `high`, or one of them NaN.
    """
    if not low <= high:
        raise ConfigError(f"low={low} must not be above high={high}")
    return scores.double().clamp(low, high)


@shaping("scale", formula="R = factor * R + shift")
def scale(scores: Tensor, *, factor: float, shift: float = 0.0) -> Tensor:
    """Return `factor * score + shift`."""
    return scores.double() * factor + shift


@shaping("format-gate", formula="R = value where the component is below 1")
def format_gate(
    scores: Tensor,
    components: Tensor,
    component_names: Sequence[str],
    has_component: Tensor,
    *,
    component: str,
    value: float = 0.0,
) -> Tensor:
    """Replace the score by `value` where a reward component, such as the format's, is below 1.

    A component that is NaN was not scored, so neither is the episode. Environments of a mixture that have no such
    component are left as they are.

    Raises:
        ConfigError: if some episode is scored, and none has a component of that name.
    """
    if scores.isnan().all():
        return scores.double()
    if component not in component_names:
        hint, known = did_you_mean(component, component_names), ", ".join(component_names)
        raise ConfigError(f"format-gate: no reward component '{component}'.{hint} There are: {known}")
    own = [place for place, name in enumerate(component_names) if name == component]
    formatted = components[:, own].double().sum(-1)  # with other weights it is 0
    passes = (formatted >= 1 - ROUNDING) | ~has_component[:, own].any(-1)
    gated = torch.where(passes, scores.double(), value)
    return torch.where(scores.isnan() | formatted.isnan(), torch.nan, gated)


def _targets(scores: Tensor, tasks: Sequence[Task], target: int | str) -> Tensor:
    """Each episode's target length, float64 `[E]`; NaN for a task without one."""
    if isinstance(target, int):
        return torch.full((len(tasks),), target, dtype=torch.float64)
    for task in tasks:
        value = task.get(target, "missing")
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            found = f"is {value!r}" if target in task else f"is none of {', '.join(task) or 'no keys'}"
            raise ConfigError(
                f"length target '{target}' {found} in task {dict(task)}: give each task a number of tokens under that "
                "key (null where it asks for no length), or set target to a number for all"
            )
    targets = torch.tensor([math.nan if (n := task[target]) is None else n for task in tasks], dtype=torch.float64)
    bad = targets[(targets < 0) & ~scores.isnan()]
    if bad.numel():
        raise ConfigError(f"target {bad[0].item()}: a length can't be negative; null says that none was asked for")
    return targets


def _beside(scores: Tensor, values: Tensor) -> Tensor:
    """Return lengths as float64, or raise if they don't belong to `scores`."""
    if values.shape != scores.shape:
        raise ConfigError(f"lengths of shape {tuple(values.shape)} for scores of shape {tuple(scores.shape)}")
    values = values.double()
    # a NaN here would silently turn a scored episode into one that is not
    if bool((values.isnan() & ~scores.isnan()).any()):
        raise ConfigError("lengths are NaN for a scored episode; set the score to NaN if it is not to be trained on")
    return values


def _only_scored(values: Tensor, scores: Tensor) -> Tensor:
    return torch.where(scores.isnan(), torch.nan, values)
