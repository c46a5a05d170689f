"""Filters: which episodes are worth a gradient, and which groups are worth a place in the batch.

A filter returns a bool mask `[E]`, True for the episodes to keep; filters combine with `&`. It changes nothing else: a
dropped episode keeps its place in its group's statistics. Whether it still counts in the denominators of the loss is
decided by which episodes the caller counts there; systems differ, so every filter says what they do. A NaN score or
advantage is an episode that is not scored.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agent_rl.errors import ConfigError

TOLERANCE = 1e-6
"""Advantages below this, and scores closer than this, differ by rounding only; `!= 0` would keep them."""


def informative(advantages: Tensor, *, tolerance: float = TOLERANCE) -> Tensor:
    """Keep the episodes whose advantage is not 0, since nothing else has a gradient.

    Compared with a tolerance: equal rewards that are sums of floats leave advantages of 1e-17, which `!= 0` keeps and a
    division by their deviation blows up (NeMo-RL#4158). Dropping these episodes changes no gradient as long as they
    still count in the denominators; not counted, as in DAPO, the fewer informative episodes there are, the larger their
    steps.

    Args:
        advantages: `[E]`, NaN for an episode that is not scored.
        tolerance: the smallest absolute advantage that is kept; 0 keeps every scored episode.
    """
    return advantages.abs() >= tolerance


def scored(scores: Tensor) -> Tensor:
    """Keep the episodes that have a score: not those that failed or that no judge could score.

    The others belong in no denominator: they are no evidence about the policy.
    """
    return ~scores.isnan()


def not_overlong(truncated: Tensor) -> Tensor:
    """Keep the episodes that ended by themselves: overlong filtering (DAPO, Yu et al. 2025, section 3.4).

    An episode cut by a limit of tokens or turns would be punished for a length that the model does not see. Its score
    stays in the statistics of its group. TRL (`mask_truncated_completions`) and SkyRL (`apply_overlong_filtering`) set
    the loss mask of these rows to 0, so that they still count as sequences, but not as tokens, in the denominators.

    Args:
        truncated: bool `[E]`, True where a limit ended the episode.
    """
    return ~truncated.bool()


def varied_groups(scores: Tensor, groups: Tensor, *, tolerance: float = TOLERANCE) -> Tensor:
    """Keep the groups whose scores are not all equal: the criterion of dynamic sampling (DAPO, eq. 11).

    Stated for any score: the highest and the lowest differ by more than `tolerance`. A mean strictly between 0 and 1
    (OpenRLHF's range filter) is the same for scores in {0, 1} only and drops good groups of others (OpenRLHF#1270); a
    standard deviation other than exactly 0 (verl) keeps rounding noise. A group with a single scored episode is not
    varied; verl keeps it. DAPO fills the batch up with other groups (`dynamic_sampling`) and counts only kept ones.

    Args:
        scores: `[E]`, NaN for an episode that is not scored: it has no say and is not kept, even in a kept group.
        groups: int64 `[E]`.
        tolerance: the largest difference that is still rounding.
    """
    low, high = group_range(scores, groups)
    return (high - low > tolerance) & scored(scores)


def on_policy(versions_oldest: Tensor, current: int, *, max_staleness: int) -> Tensor:
    """Keep the episodes whose every sampled token comes from weights at most `max_staleness` versions old.

    The oldest token decides, as an episode may span updates of the weights. Systems that bound staleness drop such
    episodes before the batch is made, so they count nowhere.

    Args:
        versions_oldest: int64 `[E]`, the lowest version among the SAMPLED tokens of the episode (`policy_versions` of a
            trajectory holds -1 elsewhere); -1 for an episode with nothing sampled, which is not kept.
        current: the version that is about to be trained.
        max_staleness: how many versions older than `current` a token may be; 0 for strictly on-policy.
    """
    return (versions_oldest >= 0) & (current - versions_oldest <= max_staleness)


def group_range(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value of each episode's group, float64 `[E]` both.

    NaN values have no say; where a whole group is NaN the lowest is inf and the highest -inf.

    Args:
        values: `[E]`.
        groups: int64 `[E]`, any ids.

    Raises:
        ConfigError: if the shapes differ.
    """
    if values.shape != groups.shape:
        raise ConfigError(f"groups of shape {tuple(groups.shape)} for values of shape {tuple(values.shape)}: one each")
    ids, member = torch.unique(groups, return_inverse=True)
    values = values.double()
    known = ~values.isnan()

    def extreme(reduce: str, empty: float) -> Tensor:
        source = torch.where(known, values, empty)
        return source.new_full(ids.shape, empty).scatter_reduce(0, member, source, reduce)[member]

    return extreme("amin", math.inf), extreme("amax", -math.inf)
