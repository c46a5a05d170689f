"""Pairwise objectives: learning from pairs of episodes of the same task, one better than the other.

A pair's rows need each other for one number only, its margin. So before every update the whole batch is scored under
theta, and `dpo_slopes` puts the slope of the pairs' loss in the place of the advantages: the loss of each token is its
own again, and the gradient does not depend on how the batch is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NewType

from pydantic import Field

from agent_rl.algorithms.components import Positive, objective
from agent_rl.algorithms.objectives.base import Prepared, TokenLoss
from agent_rl.algorithms.objectives.token import reinforce
from agent_rl.core.episode import ROUNDING
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]

PairSides = NewType("PairSides", "Tensor")
"""What an advantage for pairwise objectives returns, float64 `[E]`: 1 for the better episode of a pair, -1 for the
worse one, 0 for all others."""


def dpo_slopes(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    sides: Tensor,
    group: Tensor,
    mask: Tensor,
    *,
    beta: Positive = 0.1,
    label_smoothing: Smoothing = 0.0,
) -> Prepared:
    """Return advantages with which a policy gradient takes the step of DPO's mean loss: its downhill slope.

    The rows of a group are a pair; `sides`, `[B, T]`, are above 0 in those of the better episode, below 0 in those of
    the worse one. DPO's gradient is `-beta sigmoid(-m)` times that of log theta of the better less that of the worse
    (Rafailov et al. 2023, under eq. 7). The metrics are TRL's, means over pairs.
    """
    number, pair = torch.unique(group, return_inverse=True)
    worse = (sides < 0).any(-1).long()

    def by_pair(rows: Tensor) -> tuple[Tensor, Tensor]:
        better_and_worse = rows.new_zeros(2 * len(number)).index_add(0, pair + len(number) * worse, rows)
        chosen, rejected = better_and_worse.chunk(2)
        return chosen, rejected

    with torch.enable_grad():  # by theta's numbers, not by the weights behind them
        leaf = logprobs.detach().double().requires_grad_()
        chosen, rejected = by_pair(sequence_logprob(leaf, mask))
        references = by_pair(sequence_logprob(reference_logprobs, mask))
        loss, margin = dpo_loss(chosen, rejected, *references, beta=beta, label_smoothing=label_smoothing)
        (slope,) = torch.autograd.grad(loss.mean(), leaf)
    metrics = {
        "train/loss": loss,
        "rewards/chosen": beta * (chosen - references[0]),
        "rewards/rejected": beta * (rejected - references[1]),
        "rewards/margins": margin,
        "rewards/accuracies": (margin > 0).double(),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    means = {name: float(values.detach().mean()) for name, values in metrics.items()}
    return Prepared(means | {"train/pairs": float(len(number))}, advantages=(-slope).to(sides.dtype))


@objective(
    "dpo",
    formula="L = -log sigmoid(beta (log theta/reference of the better - of the worse)), mean over pairs",
    source="DPO, Rafailov et al. 2023, eq. 7",
    prepare=dpo_slopes,
)
def dpo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """DPO, whose slopes `dpo_slopes` has put in the place of the advantages: their policy gradient."""
    return reinforce(logprobs, old_logprobs, advantages)


def dpo_loss(
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
    are log-probabilities of whole episodes, `[P]`, by `sequence_logprob`: what a tool or the environment wrote is
    given, not chosen, and cancels. An episode of several rows has the sum of theirs. `beta` is how strongly theta is
    held to the reference, `label_smoothing` the share of pairs taken to be the wrong way round (conservative DPO,
    Mitchell 2023); the loss is then least at a finite margin. Returned are the loss and, without gradient, the margin m
    (TRL's `rewards/margins`), both float64 `[P]`.

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
    logsigmoid = torch.nn.functional.logsigmoid
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return loss, margin.detach()


def sequence_logprob(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum the log-probabilities of a row's sampled tokens, float64 `[B]`; 0 for a row without any.

    In float64, as AReaL: DPO's margin is a small difference of sums that are large for long episodes, and float32 has
    no digits for it (0.002 at 30,000 nats), so that it gets the sign wrong.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return torch.where(mask, logprobs, zero).sum(-1, dtype=torch.float64)


def preference_pairs(scores: Tensor, groups: Tensor, *, margin: float = 0.0) -> Tensor:
    """Pair the best with the worst episode of each group, int64 `[P, 2]`: indices of (chosen, rejected).

    Pairs are in the order of the groups' ids. Of episodes that are equally good, or equally bad, the first is taken;
    one that is not scored (NaN) takes no part. A group whose best and worst differ by no more than `margin` (and
    `ROUNDING`) has no pair.

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
    return scored[pairs[best - worst > margin + ROUNDING]]


def _first(hit: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the position of each group's first hit, `[groups]`; every group has one."""
    (at,) = torch.nonzero(hit, as_tuple=True)
    return at.new_zeros(groups).scatter_reduce(0, group[at], at, "amin", include_self=False)
