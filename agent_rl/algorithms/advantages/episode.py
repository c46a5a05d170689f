"""Advantages of whole episodes: how much better one did than was to be expected, a number for each.

`scores` are the episodes' total rewards, float `[E]`; NaN is an episode that is not scored: it takes no part in any
statistic and its advantage is NaN. `groups` are int64 `[E]`, any ids: episodes with the same id are samples of the same
task. Every advantage is float64 `[E]`. Where there is nothing to compare with (one scored episode in a group, or equal
scores) it is exactly 0; systems differ there, see each function. Tensors that differ in length are a ConfigError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_rl.errors import ConfigError


def group_relative(scores: Tensor, groups: Tensor, *, std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO: score minus the mean of its group, divided by the group's standard deviation (Shao et al. 2024, §4.1.2).

    With `std=False` the unnormalised form: Dr. GRPO (Liu et al. 2025), MiniRL (arXiv 2512.01374), and what
    REINFORCE++-baseline whitens over tokens afterwards.

    A group with a single scored episode has 0; verl takes mean 0 and deviation 1 there, so that the advantage is the
    score.

    Args:
        scores: `[E]`.
        groups: `[E]`.
        std: divide by the standard deviation (Bessel-corrected, as in verl and TRL) plus `eps`.
        eps: in the scores' unit. verl has 1e-6, TRL 1e-4.
    """
    scores, index = _grouped(scores, groups)
    centred = scores - _mean(scores, index)
    return centred / _scale(centred, index, eps) if std else centred


def batch_normalised(scores: Tensor, groups: Tensor, kept: Tensor, *, eps: float = 1e-6) -> Tensor:
    """ScaleRL: score minus the mean of its group, divided by the batch's standard deviation (Khatri et al. 2025, §4).

    The deviation is that of the advantages, about 0 (their mean, as they are centred) and Bessel-corrected, over the
    episodes that are trained on: with zero-variance filtering the paper's effective batch. TRL's
    `scale_rewards="batch"` divides by the deviation of the rewards, in which the differences between tasks take part.

    Args:
        scores: `[E]`.
        groups: `[E]`.
        kept: bool `[E]`, the episodes that are trained on.
        eps: in the scores' unit.
    """
    scores, index = _grouped(scores, groups)
    _check_length("kept", kept, scores)
    centred = scores - _mean(scores, index)
    trained = torch.where(kept, centred, torch.nan)
    return centred / _scale(trained, torch.zeros_like(index), eps)


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """RLOO: score minus the mean of the *other* episodes of its group (Kool et al. 2019, Ahmadian et al. 2024).

    That is `n / (n - 1)` times `group_relative(std=False)`, n being the group's scored episodes. A single one has 0, as
    in verl's vectorised version; verl's loop has the score itself.
    """
    scores, index = _grouped(scores, groups)
    n = _count(scores, index)
    return (scores - _mean(scores, index)) * (n / (n - 1).clamp(min=1))


def length_weighted(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """OPO: score minus the mean of its group weighted by length, `sum(l R) / sum(l)` (Hao et al. 2025).

    The baseline that minimises the gradient's variance, if the squared norm of an episode's gradient grows with its
    length. verl has the score itself for a single episode; here it is 0.

    Args:
        scores: `[E]`.
        groups: `[E]`.
        lengths: sampled tokens of each episode, `[E]`. If nothing was sampled in a whole group, its mean is unweighted.
    """
    scores, index = _grouped(scores, groups)
    _check_length("lengths", lengths, scores)
    counted = torch.where(scores.isnan(), 0.0, lengths.double())
    counted = torch.where(_sum(counted, index) > 0, counted, torch.ones_like(scores))
    return scores - _mean(scores, index, counted)


def over_greedy(scores: Tensor, baselines: Tensor) -> Tensor:
    """ReMax: score minus the score of the greedy rollout of the same task (Li et al. 2023).

    Args:
        scores: `[E]`.
        baselines: of the greedy rollouts, `[E]`; NaN where it is not scored, and then the advantage is NaN.
    """
    _check_length("baselines", baselines, scores)
    return scores.double() - baselines.double()


def best_of_group(scores: Tensor, groups: Tensor, *, std: bool = False, eps: float = 1e-6) -> Tensor:
    """The lead of a group's best episode over the second, and 0 for all others (verl's grpo_passk, arXiv 2503.19595).

    If several share the best score all have 0. verl's is the same: it gives one of them the difference to another,
    which is 0. A single scored episode has 0; verl raises.

    Args:
        scores: `[E]`.
        groups: `[E]`.
        std: divide by the group's standard deviation (Bessel-corrected) plus `eps`, which is verl's default.
        eps: in the scores' unit.
    """
    scores, index = _grouped(scores, groups)
    best = _highest(scores, index)
    is_best = scores == best
    second = _highest(torch.where(is_best, torch.nan, scores), index)  # -inf where there is no second score
    leads = is_best & (_sum(is_best.double(), index) == 1) & (_count(scores, index) > 1)
    lead = torch.where(leads, best - second, scores * 0)  # * 0 keeps NaN
    return lead / _scale(scores - _mean(scores, index), index, eps) if std else lead


def pass_at_k(scores: Tensor, groups: Tensor, *, k: int) -> Tensor:
    """Pass@k Training: how an episode changes the success of the sets of `k` episodes it is in (Chen et al. 2025).

    The analytic form of arXiv 2508.10751. The reward of a set of k of a group's n episodes is 1 if any of them
    succeeded. Over all such sets, with c successes and w = n - c failures, its mean is `rho = 1 - C(w, k) / C(n, k)`
    and its standard deviation `sigma = sqrt(rho (1 - rho))`; an episode's advantage is the mean over the sets with it,
    minus rho, by sigma:

        success:  (1 - rho) / sigma                                     = sqrt((1 - rho) / rho)
        failure:  (1 - rho - C(w - 1, k - 1) / C(n - 1, k - 1)) / sigma = -c / w sqrt((1 - rho) / rho)

    The right-hand forms are computed: they are the same, as `C(w, k) / C(n, k)` is w / n times the last quotient, and
    nothing cancels in them. They have no epsilon (the authors' code adds 1e-6 to sigma); where sigma = 0, that is
    c = 0 or w < k, all have 0. So `k` has to be well below the group's size for there to be any signal.

    Args:
        scores: 0 or 1, or NaN, `[E]`.
        groups: `[E]`. A group with fewer than k *scored* episodes has 0.
        k: the size of the sets, at least 1.

    Raises:
        ConfigError: for another score, or if a group has fewer than k episodes, counting those that are not scored.
    """
    if k < 1:
        raise ConfigError(f"pass_at_k is about sets of at least one episode: k={k} must be 1 or more")
    scores, index = _grouped(scores, groups)
    other = scores[~(scores.isnan() | (scores == 0) | (scores == 1))]
    if other.numel():
        raise ConfigError(
            f"pass_at_k is for scores of 0 and 1, not {other[0].item()}: make the reward binary, or use group_relative"
        )
    size = _sum(torch.ones_like(scores), index)
    small = size < k
    if small.any():
        raise ConfigError(
            f"pass_at_k with k={k} needs {k} or more episodes in a group, but group {groups[small][0].item()} has "
            f"{int(size[small][0])}: lower k, or sample more episodes of each task"
        )
    n, successes = _count(scores, index), _sum(scores, index)
    failures = n - successes
    miss = torch.ones_like(scores)  # C(w, k) / C(n, k), 1 - rho
    for i in range(k):
        miss = miss * (failures - i).clamp(min=0) / (n - i).clamp(min=1)
    success = (miss / torch.where(successes > 0, 1 - miss, torch.ones_like(miss))).sqrt()
    failure = -successes / failures.clamp(min=1) * success
    return torch.where(scores == 1, success, failure) + scores * 0  # * 0 keeps NaN


def max_likelihood(scores: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """MaxRL: score minus the mean of its group, divided by that mean (Tajwar et al. 2026, arXiv 2602.02710).

    For scores of 0 and 1 the mean is the success rate p, and tasks count by about 1/p: the gradient of log p rather
    than of p. Scores must not be negative: a group whose mean is not above 0 has 0, as in prime-rl (where `eps` is 0).
    A single scored episode has 0; the authors' code takes mean 0 there, so that it has score / eps.

    Args:
        scores: `[E]`, 0 or more.
        groups: `[E]`.
        eps: added to the mean, as in the authors' code and SkyRL.
    """
    scores, index = _grouped(scores, groups)
    mean = _mean(scores, index)
    return torch.where(mean > 0, (scores - mean) / (mean + eps), scores * 0)  # * 0 keeps NaN


def decoupled(
    components: Tensor, weights: Tensor, groups: Tensor, *, eps: float = 1e-6, batch_norm: bool = True
) -> Tensor:
    """GDPO: every component of the reward made group-relative by itself, then summed and whitened (arXiv 2601.05242).

    Per component as `group_relative`, then the weighted sum over components, divided by its Bessel-corrected standard
    deviation over the batch's scored episodes plus `eps`; 0 if there is one only. Its mean over the batch is 0 by
    construction and not subtracted, as rounding would carry advantages of 0 away from 0 (which happens in TRL).

    The paper and TRL whiten over episodes, as here; verl whitens over *tokens*, so that long episodes count more: for
    that, pass `batch_norm=False` and whiten what was broadcast to the tokens. NeMo-RL has a leave-one-out baseline per
    component instead of the mean. TRL leaves a component that is not scored out of the episode's sum.

    Args:
        components: `[E, K]`. An episode with NaN in any component whose weight is not 0 is not scored, and takes no
            part in the statistics of the other components either.
        weights: `[K]`. A component with weight 0 is not looked at.
        groups: `[E]`.
        eps: beside every standard deviation.
        batch_norm: whiten over the batch.
    """
    if components.shape[1:] != weights.shape:
        raise ConfigError(
            f"components of shape {tuple(components.shape)} came with weights of shape {tuple(weights.shape)}; "
            f"there must be one weight per component"
        )
    used = weights != 0
    components = components[:, used].double()
    unscored = components.isnan().any(-1)
    total = components.new_zeros(len(components))
    for component, weight in zip(components.unbind(-1), weights[used].double(), strict=True):
        total = total + weight * group_relative(torch.where(unscored, torch.nan, component), groups, eps=eps)
    return total / _scale(total, torch.zeros_like(groups), eps) if batch_norm else total


# Statistics of groups. `index` is the group of each episode, counted from 0; what is returned is `[E]` again, the
# group's value at each of its episodes. NaN takes no part.


def _grouped(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    _check_length("groups", groups, scores)
    return scores.double(), torch.unique(groups, return_inverse=True)[1]


def _check_length(name: str, other: Tensor, scores: Tensor) -> None:
    if other.shape != scores.shape:
        raise ConfigError(
            f"scores of shape {tuple(scores.shape)} came with {name} of shape {tuple(other.shape)}; "
            f"there must be one of each per episode"
        )


def _sum(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).scatter_add(0, index, torch.where(values.isnan(), 0.0, values))[index]


def _count(values: Tensor, index: Tensor) -> Tensor:
    return _sum((~values.isnan()).double(), index)


def _highest(values: Tensor, index: Tensor) -> Tensor:
    known = torch.where(values.isnan(), -torch.inf, values)
    return torch.full_like(values, -torch.inf).scatter_reduce(0, index, known, "amax")[index]


def _mean(values: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    weights = torch.ones_like(values) if weights is None else weights
    weights = torch.where(values.isnan(), 0.0, weights)
    mean = _sum(weights * values, index) / _sum(weights, index)
    # clamped: rounding must not carry the mean of equal scores past them, an advantage of 0 is exactly 0
    return torch.minimum(torch.maximum(mean, -_highest(-values, index)), _highest(values, index))


def _scale(centred: Tensor, index: Tensor, eps: float) -> Tensor:
    """Return the Bessel-corrected standard deviation plus `eps`; 1 where the deviation is 0, so that eps may be 0."""
    std = (_sum(centred**2, index) / (_count(centred, index) - 1).clamp(min=1)).sqrt()
    return torch.where(std > 0, std + eps, torch.ones_like(std))
