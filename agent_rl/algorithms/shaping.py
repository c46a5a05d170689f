"""Reward shaping: what is done to the scores of episodes before advantages are computed from them.

Every function takes scores `[E]` and returns float64 `[E]`. NaN means not scored: it stays NaN and takes no part in any
group's statistics. The other arguments of shape `[E]` may hold anything there. Lengths count sampled tokens, unless the
caller wants to shape by something else, e.g. turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_rl.algorithms.filters import TOLERANCE, group_range
from agent_rl.errors import ConfigError


def soft_overlong(scores: Tensor, lengths: Tensor, *, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13): long episodes lose up to `penalty`.

    Nothing up to `max_length - buffer`, then linearly more, `penalty` at `max_length` and beyond. verl goes on
    linearly beyond `max_length`, which its responses can't reach; multi-turn episodes can. TRL is as here.

    Args:
        scores: `[E]`.
        lengths: `[E]`.
        max_length: the length from which the whole penalty applies.
        buffer: over how many tokens the penalty grows; 0 for a step after `max_length`. The paper has 4096 of 20480.
        penalty: what is subtracted at most.

    Raises:
        ConfigError: if `buffer` is not in `0..max_length`.
    """
    if not 0 <= buffer <= max_length:
        raise ConfigError(f"buffer={buffer} must be between 0 and max_length={max_length}: it is the end of that range")
    over = _beside(scores, lengths, "lengths") - (max_length - buffer)
    share = (over / buffer).clamp(0, 1) if buffer else (over > 0).double()
    return scores.double() - penalty * share


def length_l1(scores: Tensor, lengths: Tensor, targets: Tensor, *, alpha: float = 3e-4) -> Tensor:
    """L1-Exact: `score - alpha |target - length|` (Aggarwal & Welleck 2025, arXiv 2503.04697, eq. 1).

    Additive: a wrong answer of the right length may beat a right one of a wrong length.

    Args:
        scores: `[E]`; 1 for correct and 0 for wrong in the paper.
        lengths: `[E]`.
        targets: `[E]`, the length that the prompt asked for; NaN where it asked for none, which leaves the score as is.
        alpha: the penalty per token; the paper has 0.0003.

    Raises:
        ConfigError: if a target is negative, the authors' code for "no target" and "at most".
    """
    off = (_targets(scores, targets) - _beside(scores, lengths, "lengths")).abs()
    return scores.double() - alpha * torch.where(targets.isnan(), 0.0, off)


def length_l1_max(
    scores: Tensor, lengths: Tensor, targets: Tensor, *, alpha: float = 3e-4, delta: float = 0.5
) -> Tensor:
    """L1-Max: `score * clip(alpha (target - length) + delta, 0, 1)` (Aggarwal & Welleck 2025, eq. 2).

    The paper's score is 1 for correct and 0 for wrong. A score below 0 is left as is, since the product would reward it
    for being overlong. The authors' code has an alpha of 1/1000.

    Args:
        scores: `[E]`.
        lengths: `[E]`.
        targets: `[E]`, the length that the prompt allowed; NaN where it set no limit, which leaves the score as is.
        alpha: the slope per token; the paper has 0.0003.
        delta: the factor of an episode that is exactly as long as was allowed.

    Raises:
        ConfigError: if a target is negative, the authors' code for "no target" and "at most".
    """
    short = _targets(scores, targets) - _beside(scores, lengths, "lengths")
    factor = (alpha * short + delta).clamp(0, 1)
    scores = scores.double()
    return torch.where(targets.isnan() | ~(scores > 0), scores, scores * factor)


def length_group(
    scores: Tensor, lengths: Tensor, groups: Tensor, *, coefficient: float, correct: float = 1.0
) -> Tensor:
    """Length reward relative to the group (Kimi k1.5, Kimi Team 2025, section 2.3.3).

    `lambda = 0.5 - (length - shortest) / (longest - shortest)` is added, times `coefficient`; where the score is below
    `correct`, only if it is negative. So among correct episodes the shorter ones gain and the longer ones lose, and
    long wrong ones lose. Shortest and longest are of all scored episodes of the group, right or wrong; where they are
    equal nothing is added. The report warms it up: off at first, then with a constant coefficient. open-r1's
    `len_reward` takes shortest and longest over the whole call, not the group, in characters.

    Args:
        scores: `[E]`.
        lengths: `[E]`.
        groups: int64 `[E]`.
        coefficient: the weight of the length reward.
        correct: an episode is correct if its score is at least this.
    """
    scores = scores.double()
    lengths = _beside(scores, lengths, "lengths")
    shortest, longest = group_range(_only_scored(lengths, scores), groups)
    spread = longest - shortest
    reward = 0.5 - (lengths - shortest) / torch.where(spread > 0, spread, 1.0)
    reward = torch.where(scores >= correct - TOLERANCE, reward, reward.clamp(max=0))
    return scores + coefficient * torch.where(spread > 0, reward, 0.0)


def relative_cost(scores: Tensor, costs: Tensor, groups: Tensor, *, coefficient: float, gated: bool = False) -> Tensor:
    """Penalty on a cost, by how well the group does (prime-rl's linear length penalty, prime-rl#2901).

    `score - coefficient * mean score of the group * cost / highest cost of the group`: the more often a task is solved,
    the more it matters to solve it cheaply; a group that never solves it pays nothing. For several costs (prime-rl has
    sampled tokens .25, context tokens .1, turns .1) add up the differences to the unshaped scores, not one after the
    other; prime-rl divides both kinds of tokens by the highest total.

    Args:
        scores: `[E]`; meant for scores from 0 to 1. A mean or a score below 0 counts as 0, or long would be good.
        costs: `[E]`, at least 0: tokens, turns, calls, ...
        groups: int64 `[E]`.
        coefficient: what the most expensive episode of a group that is always solved loses.
        gated: the penalty is also times the episode's own score, so that wrong episodes pay nothing.
    """
    scores = scores.double()
    costs = _beside(scores, costs, "costs")
    _, highest = group_range(_only_scored(costs, scores), groups)
    ids, member = torch.unique(groups, return_inverse=True)
    known = ~scores.isnan()
    total = scores.new_zeros(ids.shape).scatter_add(0, member, scores.nan_to_num(nan=0.0))
    count = scores.new_zeros(ids.shape).scatter_add(0, member, known.double())
    mean = (total / count.clamp(min=1)).clamp(min=0)[member]
    share = torch.where(highest > 0, costs / torch.where(highest > 0, highest, 1.0), 0.0)
    penalty = coefficient * mean * share
    return scores - (penalty * scores.clamp(min=0) if gated else penalty)


def clip(scores: Tensor, *, low: float, high: float) -> Tensor:
    """Clip scores to `[low, high]`; -inf and inf for no bound.

    Raises:
        ConfigError: if `low` is above `high`, or one of them NaN.
    """
    if not low <= high:
        raise ConfigError(f"low={low} must not be above high={high}")
    return scores.double().clamp(low, high)


def scale(scores: Tensor, *, factor: float, shift: float = 0.0) -> Tensor:
    """Return `factor * score + shift`."""
    return scores.double() * factor + shift


def format_gate(scores: Tensor, formatted: Tensor, *, value: float = 0.0) -> Tensor:
    """Replace the score by `value` where the format was not kept, whatever else was right.

    Args:
        scores: `[E]`.
        formatted: `[E]`, the score of the format: kept if at least 1. NaN: it was not scored, so the result is NaN.
        value: the score of an episode without format.
    """
    formatted = _beside(scores, formatted, "formatted", known=False)
    scores = scores.double()
    gated = torch.where(formatted >= 1 - TOLERANCE, scores, value)
    return torch.where(scores.isnan() | formatted.isnan(), torch.nan, gated)


def _beside(scores: Tensor, values: Tensor, name: str, *, known: bool = True) -> Tensor:
    """Return `values` as float64, or raise if they don't belong to `scores`."""
    if values.shape != scores.shape:
        raise ConfigError(f"{name} of shape {tuple(values.shape)} for scores of shape {tuple(scores.shape)}")
    values = values.double()
    # a NaN here would silently turn a scored episode into one that is not
    if known and bool((values.isnan() & ~scores.isnan()).any()):
        raise ConfigError(f"{name} are NaN for a scored episode; set the score to NaN if it is not to be trained on")
    return values


def _targets(scores: Tensor, targets: Tensor) -> Tensor:
    targets = _beside(scores, targets, "targets", known=False)
    bad = targets[(targets < 0) & ~scores.isnan()]
    if bad.numel():
        raise ConfigError(f"target {bad[0].item()}: a length can't be negative; NaN says that none was asked for")
    return targets


def _only_scored(values: Tensor, scores: Tensor) -> Tensor:
    return torch.where(scores.isnan(), torch.nan, values)
