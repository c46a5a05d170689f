"""Advantages of whole episodes: how much better one did than was to be expected, a number for each.

`scores` are the episodes' total rewards, float `[E]`; NaN is an episode that is not scored: it takes no part in any
statistic and its advantage is NaN. `groups` are int64 `[E]`, any ids: episodes with the same id are samples of the same
task. Every advantage is float64 `[E]`. Where there is nothing to compare with (one scored episode in a group, or equal
scores) it is exactly 0; systems differ there, see each function. Tensors that differ in length are a ConfigError.
Standard deviations have Bessel's correction; `eps`, in the scores' unit, is added to what is divided by.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from agent_rl.algorithms.advantages.token import always_whitened
from agent_rl.algorithms.advantages.token import whiten as whiten_tokens
from agent_rl.algorithms.components import Count, NotNegative, advantage
from agent_rl.algorithms.group_stats import (
    check_length,
    group_count,
    group_deviation,
    group_index,
    group_mean,
    group_range,
    group_sum,
)
from agent_rl.algorithms.objectives.pairwise import PairSides, preference_pairs
from agent_rl.core.episode import ROUNDING
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@advantage(
    "group-relative",
    formula="A = (R - mean_group) [/ (std_group + eps) if std]",
    source="GRPO, Shao et al. 2024, sec. 4.1.2",
)
def group_relative(scores: Tensor, groups: Tensor, *, std: bool = True, eps: NotNegative = 1e-6) -> Tensor:
    """GRPO: score minus the mean of its group, divided by the group's deviation (Shao et al. 2024, sec. 4.1.2).

    With `std=False` the unnormalised form: Dr. GRPO (Liu et al. 2025), MiniRL (arXiv 2512.01374), and what
    REINFORCE++-baseline whitens over tokens afterwards. verl has eps 1e-6 and TRL 1e-4, both Bessel's correction. verl
    takes mean 0 and deviation 1 for a single scored episode, so that the advantage is the score.
    """
    scores, index = scores.double(), group_index(groups, scores)
    centred = scores - group_mean(scores, index)
    return centred / group_deviation(centred, index, eps) if std else centred


@advantage(
    "batch-normalised",
    formula="A = (R - mean_group) / (std_batch of these + eps)",
    source="ScaleRL, Khatri et al. 2025, §4",
)
def batch_normalised(scores: Tensor, groups: Tensor, kept: Tensor, *, eps: NotNegative = 1e-6) -> Tensor:
    """ScaleRL: score minus the mean of its group, divided by the batch's standard deviation (Khatri et al. 2025, §4).

    The deviation is that of the advantages, about 0 (their mean, as they are centred), over the episodes that are
    trained on (`kept`): with zero-variance filtering the paper's effective batch. TRL's `scale_rewards="batch"` divides
    by the deviation of the rewards, in which the differences between tasks take part.
    """
    scores, index = scores.double(), group_index(groups, scores)
    check_length("kept", kept, scores)
    centred = scores - group_mean(scores, index)
    trained = torch.where(kept, centred, torch.nan)
    return centred / group_deviation(trained, torch.zeros_like(index), eps)


@advantage("leave-one-out", formula="A = R - mean of the others", source="RLOO, Ahmadian et al. 2024, eq. 8")
def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """RLOO: score minus the mean of the *other* episodes of its group (Kool et al. 2019, Ahmadian et al. 2024).

    That is `n / (n - 1)` times `group_relative(std=False)`, n being the group's scored episodes. A single one has 0, as
    in verl's vectorised version; verl's loop has the score itself.
    """
    scores, index = scores.double(), group_index(groups, scores)
    n = group_count(scores, index)
    return (scores - group_mean(scores, index)) * (n / (n - 1).clamp(min=1))


@advantage("length-weighted", formula="A = R - sum_group(|y| R) / sum_group |y|", source="OPO, Hao et al. 2025, eq. 9")
def length_weighted(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """OPO: score minus the mean of its group weighted by length, `sum(l R) / sum(l)` (Hao et al. 2025).

    The baseline that minimises the gradient's variance, if the squared norm of an episode's gradient grows with its
    length, the sampled tokens. Where a whole group sampled none, its mean is unweighted. verl has the score itself for
    a single episode; here it is 0.
    """
    scores, index = scores.double(), group_index(groups, scores)
    check_length("lengths", lengths, scores)
    counted = torch.where(scores.isnan(), 0.0, lengths.double())
    counted = torch.where(group_sum(counted, index) > 0, counted, torch.ones_like(scores))
    return scores - group_mean(scores, index, counted)


@advantage("over-greedy", formula="A = R - R of the greedy episode", source="ReMax, Li et al. 2023, 2310.10505")
def over_greedy(scores: Tensor, baselines: Tensor) -> Tensor:
    """ReMax: score minus the score of the greedy rollout of the same task; NaN where either is not scored."""
    check_length("baselines", baselines, scores)
    return scores.double() - baselines.double()


@advantage("best-of-group", formula="A = R_best - R_second for the best, else 0", source="verl grpo_passk")
def best_of_group(scores: Tensor, groups: Tensor, *, std: bool = False, eps: NotNegative = 1e-6) -> Tensor:
    """The lead of a group's best episode over the second, and 0 for all others (verl's grpo_passk, arXiv 2503.19595).

    If several share the best score all have 0. verl's is the same: it gives one of them the difference to another,
    which is 0. A single scored episode has 0; verl raises. verl's default is `std=True`: the group's deviation divides.
    """
    scores, index = scores.double(), group_index(groups, scores)
    _, best = group_range(scores, index)
    is_best = scores == best
    _, second = group_range(torch.where(is_best, torch.nan, scores), index)  # -inf where there is no second score
    leads = is_best & (group_sum(is_best.double(), index) == 1) & (group_count(scores, index) > 1)
    lead = torch.where(leads, best - second, scores * 0)  # * 0 keeps NaN
    return lead / group_deviation(scores - group_mean(scores, index), index, eps) if std else lead


@advantage("pass-at-k", formula="A of the pass@k reward over all k-subsets", source="Chen et al. 2025, 2508.10751")
def pass_at_k(scores: Tensor, groups: Tensor, *, k: Count) -> Tensor:
    """Pass@k Training: how an episode changes the success of the sets of `k` episodes it is in (Chen et al. 2025).

    The analytic form of arXiv 2508.10751, for scores of 0 and 1. The reward of a set of k of a group's n episodes is 1
    if any of them succeeded. Over all such sets, with c successes and w = n - c failures, its mean is
    `rho = 1 - C(w, k) / C(n, k)` and its standard deviation `sigma = sqrt(rho (1 - rho))`; an episode's advantage is
    the mean over the sets with it, minus rho, by sigma:

        success:  (1 - rho) / sigma                                     = sqrt((1 - rho) / rho)
        failure:  (1 - rho - C(w - 1, k - 1) / C(n - 1, k - 1)) / sigma = -c / w sqrt((1 - rho) / rho)

    The right-hand forms are computed: they are the same, as `C(w, k) / C(n, k)` is w / n times the last quotient, and
    nothing cancels in them. They have no epsilon (the authors' code adds 1e-6 to sigma); where sigma = 0, that is c = 0
    or w < k, all have 0, as has a group with fewer than k *scored* episodes. So `k` has to be well below the group's
    size for there to be any signal.

    Raises:
        ConfigError: for another score, or if a group has fewer than k episodes, counting those that are not scored.
    """
    if k < 1:
        raise ConfigError(f"pass_at_k is about sets of at least one episode: k={k} must be 1 or more")
    scores, index = scores.double(), group_index(groups, scores)
    scores = torch.where((scores - scores.round()).abs() < ROUNDING, scores.round(), scores)  # sums of weighted rewards
    other = scores[~(scores.isnan() | (scores == 0) | (scores == 1))]
    if other.numel():
        raise ConfigError(
            f"pass_at_k is for scores of 0 and 1, not {other[0].item()}: make the reward binary, or use group_relative"
        )
    size = group_sum(torch.ones_like(scores), index)
    small = size < k
    if small.any():
        raise ConfigError(
            f"pass_at_k with k={k} needs {k} or more episodes in a group, but group {groups[small][0].item()} has "
            f"{int(size[small][0])}: lower k, or sample more episodes of each task"
        )
    n, successes = group_count(scores, index), group_sum(scores, index)
    failures = n - successes
    miss = torch.ones_like(scores)  # C(w, k) / C(n, k), 1 - rho
    for i in range(k):
        miss = miss * (failures - i).clamp(min=0) / (n - i).clamp(min=1)
    success = (miss / torch.where(successes > 0, 1 - miss, torch.ones_like(miss))).sqrt()
    failure = -successes / failures.clamp(min=1) * success
    return torch.where(scores == 1, success, failure) + scores * 0  # * 0 keeps NaN


@advantage(
    "max-likelihood",
    formula="A = (R - mean_group) / (mean_group - min(0, worst_group))",
    source="MaxRL, Tajwar et al. 2026",
)
def max_likelihood(scores: Tensor, groups: Tensor, *, eps: NotNegative = 1e-6) -> Tensor:
    """MaxRL: score minus the mean of its group, divided by that mean (Tajwar et al. 2026, arXiv 2602.02710).

    For scores of 0 and 1 the mean is the success rate p, and tasks count by about 1/p: the gradient of log p rather
    than of p. The paper's scores are not negative; a group that has one below 0 is measured from its lowest score, so
    that -1 and 1 do as 0 and 1. The others leave such groups with flipped or unbounded advantages, or none (prime-rl).
    `eps` is 1e-6 in the authors' code and SkyRL, 0 in prime-rl. For a single episode the authors' code has score / eps.
    """
    scores, index = scores.double(), group_index(groups, scores)
    mean, (worst, _) = group_mean(scores, index), group_range(scores, index)
    above = mean - worst.clamp(max=0)
    return torch.where(above > 0, (scores - mean) / (above + eps), scores * 0)  # * 0 keeps NaN


def _token_whitened(
    found: Tensor, trained: Tensor, *, whiten: Literal["episodes", "tokens", "no"] = "episodes"
) -> Tensor:
    return whiten_tokens(found, trained) if whiten == "tokens" else found


@advantage(
    "decoupled",
    formula="A = whiten(sum_k w_k (r_k - mean_group) / (std_group + eps))",
    source="GDPO, 2601.05242",
    finish=_token_whitened,
)
def decoupled(
    components: Tensor,
    component_weights: Tensor,
    groups: Tensor,
    *,
    whiten: Literal["episodes", "tokens", "no"] = "episodes",
    eps: NotNegative = 1e-6,
) -> Tensor:
    """GDPO: every component of the reward made group-relative by itself, then summed and whitened (arXiv 2601.05242).

    Per component, `[E, K]`, as `group_relative`, then the weighted sum over components, divided by its standard
    deviation over the batch's scored episodes; 0 if there is one only. Its mean over the batch is 0 by construction and
    not subtracted, as rounding would carry advantages of 0 away from 0 (which happens in TRL). An episode with NaN in
    any component whose weight is not 0 is not scored, and takes no part in the statistics of the other components
    either; TRL leaves only that component out of the episode's sum.

    The paper and TRL whiten over episodes; verl whitens over *tokens*, afterwards, so that long episodes count more.
    NeMo-RL has a leave-one-out baseline per component instead of the mean. Of a batch without components, in which all
    episodes failed, none is scored.
    """
    if not len(component_weights):
        return components.new_full((len(components),), torch.nan, dtype=torch.float64)
    used = component_weights != 0
    components = components[:, used].double()
    unscored = components.isnan().any(-1)
    total = components.new_zeros(len(components))
    for component, weight in zip(components.unbind(-1), component_weights[used].double(), strict=True):
        total = total + weight * group_relative(torch.where(unscored, torch.nan, component), groups, eps=eps)
    return total / group_deviation(total, torch.zeros_like(groups), eps) if whiten == "episodes" else total


@advantage(
    "reinforce-pp-baseline",
    formula="A = whiten(R - mean_group)",
    source="REINFORCE++-baseline, Hu et al. 2025",
    finish=always_whitened,
)
def reinforce_pp_baseline(scores: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE++ with a group baseline: reward minus group mean, then whitened over the trained tokens."""
    return group_relative(scores, groups, std=False)


@advantage("ones", formula="A = 1", source="RFT: filters say what is learned")
def ones(scores: Tensor) -> Tensor:
    """1 for every scored episode: what is trained on, filters decide."""
    return torch.where(scores.isnan(), math.nan, torch.ones_like(scores))


@advantage(
    "best-against-worst", formula="A = 1 for the best, -1 for the worst where they are more than margin apart, else 0"
)
def best_against_worst(
    scores: Tensor, groups: Tensor, kept: Tensor, lengths: Tensor, *, margin: NotNegative = 0.0
) -> PairSides:
    """The best episode of a group and the worst, among those trained on: a pair to learn preferences from."""
    able = kept & (lengths > 0)
    pairs = preference_pairs(scores.masked_fill(~able, math.nan), groups, margin=margin)
    sides = torch.zeros_like(scores)
    sides[pairs[:, 0]], sides[pairs[:, 1]] = 1.0, -1.0
    return PairSides(sides)
