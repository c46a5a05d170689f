"""Preference objectives: learning from pairs of episodes of the same task, one better than the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agent_rl.errors import ConfigError

TIE = 1e-6
"""Scores that differ by no more are equal: sums of rewards carry float noise."""


def dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_reference: Tensor,
    rejected_reference: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Direct preference optimisation, `-log sigmoid(m)`, m the margin between two implicit rewards, per pair.

    `m = beta * ((chosen - chosen_reference) - (rejected - rejected_reference))` (Rafailov et al. 2023, eq. 7). All four
    are log-probabilities of whole episodes, by `sequence_logprob`: what a tool or the environment wrote is given, not
    chosen, and cancels. An episode of several rows has the sum of theirs.

    Args:
        chosen_logprobs: `[P]` of the better episodes under theta, with gradient.
        rejected_logprobs: `[P]` of the worse ones under theta, with gradient.
        chosen_reference: `[P]` of the better ones under the reference.
        rejected_reference: `[P]` of the worse ones under the reference.
        beta: how strongly theta is held to the reference, above 0.
        label_smoothing: the share of pairs taken to be the wrong way round, in [0, 0.5) (conservative DPO, Mitchell
            2023); the loss is then least at a finite margin.

    Returns:
        The loss, float64 `[P]`, and the margin m, float64 `[P]`, without gradient (TRL's `rewards/margins`).

    Raises:
        ConfigError: for a label smoothing with which pairs say nothing, or the opposite.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing is {label_smoothing}; it must be in [0, 0.5): it is the share of pairs that are the "
            "wrong way round, and if it were half of them there would be nothing to learn"
        )
    chosen = chosen_logprobs.double() - chosen_reference.double()
    rejected = rejected_logprobs.double() - rejected_reference.double()
    margin = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return loss, margin.detach()


def sequence_logprob(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum the log-probabilities of a row's sampled tokens, float64 `[B]`; 0 for a row without any.

    In float64, as AReaL: DPO's margin is a small difference of sums that are large for long episodes, and float32 has
    no digits for it (0.002 at 30,000 nats), so that it gets the sign wrong.

    Args:
        logprobs: `[B, T]`, with gradient; anything where nothing was sampled.
        mask: bool `[B, T]`, True at sampled tokens.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return torch.where(mask, logprobs, zero).sum(-1, dtype=torch.float64)


def preference_pairs(scores: Tensor, groups: Tensor, *, margin: float = 0.0) -> Tensor:
    """Pair the best with the worst episode of each group, int64 `[P, 2]`: indices of (chosen, rejected).

    Pairs are in the order of the groups' ids. Of episodes that are equally good, or equally bad, the first is taken.

    Args:
        scores: float64 `[E]`; NaN (not scored) takes no part.
        groups: int64 `[E]`; equal ids are samples of the same task.
        margin: 0 or more. A group whose best and worst differ by no more than this (and `TIE`) has no pair.

    Raises:
        ConfigError: if the margin is below 0, with which an episode could be preferred to itself.
    """
    if not margin >= 0:
        raise ConfigError(f"margin is {margin}; it must be 0 or more: the least difference in score that counts")
    (scored,) = torch.nonzero(~scores.isnan(), as_tuple=True)
    ids, group = torch.unique(groups[scored], return_inverse=True)
    score = scores[scored].double()
    best = score.new_zeros(len(ids)).scatter_reduce(0, group, score, "amax", include_self=False)
    worst = score.new_zeros(len(ids)).scatter_reduce(0, group, score, "amin", include_self=False)
    pairs = torch.stack([_first(score == extreme[group], group, len(ids)) for extreme in (best, worst)], dim=-1)
    return scored[pairs[best - worst > margin + TIE]]


def _first(hit: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the position of each group's first hit, `[groups]`; every group has one."""
    (at,) = torch.nonzero(hit, as_tuple=True)
    return at.new_zeros(groups).scatter_reduce(0, group[at], at, "amin", include_self=False)
