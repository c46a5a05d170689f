"""Filters: choose the episodes and groups to train on.

A filter returns a bool mask `[E]`, True for the episodes to keep; filters combine with `&`. It changes nothing else: a
dropped episode keeps its place in its group's statistics. Whether it still counts in the denominators of the loss is
decided by which episodes the caller counts there; systems differ, so every filter says what they do. A NaN score or
advantage is an episode that is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_rl.algorithms.components import Count, NotNegative
from agent_rl.algorithms.components import filter as episode_filter
from agent_rl.algorithms.group_stats import group_index, group_range
from agent_rl.core.episode import ROUNDING
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@episode_filter("not-overlong", formula="episodes that no token limit cut short", source="DAPO, overlong filtering")
def not_overlong(cut_short: Tensor) -> Tensor:
    """Keep the episodes that ended by themselves: overlong filtering (DAPO, Yu et al. 2025, section 3.4).

    An episode cut by a limit of tokens or turns would be punished for a length that the model does not see. Its score
    stays in the statistics of its group. TRL (`mask_truncated_completions`) and SkyRL (`apply_overlong_filtering`) set
    the loss mask of these rows to 0, so that they still count as sequences, but not as tokens, in the denominators.
    """
    return ~cut_short


@episode_filter(
    "varied-groups",
    formula="groups with max R - min R > tolerance, R not shaped",
    source="DAPO, Yu et al. 2025, eq. 11",
)
def varied_groups(unshaped: Tensor, groups: Tensor, *, tolerance: NotNegative = ROUNDING) -> Tensor:
    """Keep the groups whose scores are not all equal: the criterion of dynamic sampling (DAPO, eq. 11).

    It judges the scores of the environment, as the paper does accuracy: a group that is all right differs by its length
    penalties only, and would be trained on these alone.

    Stated for any score: the highest and the lowest differ by more than `tolerance`, the largest difference that is
    still rounding. A mean strictly between 0 and 1 (OpenRLHF's range filter) is the same for scores in {0, 1} only and
    drops good groups of others (OpenRLHF#1270); a standard deviation other than exactly 0 (verl) keeps rounding noise.
    A group with a single scored episode is not varied; verl keeps it. An episode that is not scored does not count and
    is not kept, even in a kept group. DAPO fills the batch up with other groups (`dynamic_sampling`) and counts only
    kept ones.
    """
    low, high = group_range(unshaped.double(), group_index(groups, unshaped))
    return (high - low > tolerance) & ~unshaped.isnan()


@episode_filter(
    "successful",
    formula="the first `most` distinct episodes of a task with R >= threshold",
    source="RFT, Yuan et al. 2023, 2308.01825, sec. 3.3; STaR, RAFT",
)
def successful(
    scores: Tensor,
    kept: Tensor,
    groups: Tensor,
    sampled: Sequence[tuple[int, ...]],
    *,
    threshold: float = 1.0,
    most: Count | None = None,
) -> Tensor:
    """Keep the episodes that score at least `threshold`, each way to succeed once, at most `most` of a group.

    A score that is short of it by rounding reaches it: weighted by 0.7, 0.2 and 0.1, three rewards of 1 are below 1.

    Two episodes of a group are the same if they sampled the same tokens. RFT keeps every distinct path to an answer
    (its paths are equal if their equations are; more of them help more), STaR one, RAFT the best of the samples.
    What another filter has dropped counts for nothing.
    """
    chosen, seen = torch.zeros_like(kept), dict[int, set[tuple[int, ...]]]()
    for number in torch.nonzero(kept & (scores >= threshold - ROUNDING))[:, 0].tolist():
        ways, way = seen.setdefault(int(groups[number]), set()), sampled[number]
        if way and way not in ways and (most is None or len(ways) < most):
            ways.add(way)
            chosen[number] = True
    return chosen


def on_policy(versions_oldest: Tensor, current: int, *, max_staleness: int) -> Tensor:
    """Keep the episodes whose every sampled token comes from weights at most `max_staleness` versions behind `current`.

    The oldest token decides, as an episode may span updates of the weights: `versions_oldest`, int64 `[E]`, is -1 for
    an episode with nothing sampled, which is not kept. Systems that bound staleness drop such episodes before the batch
    is made, so they count nowhere.
    """
    return (versions_oldest >= 0) & (current - versions_oldest <= max_staleness)


@episode_filter(
    "max-staleness",
    formula="episodes with no token older than `steps` versions",
    source="AReaL, prime-rl",
    layout="tokens",
)
def max_staleness(
    kept: Tensor, groups: Tensor, versions: Tensor, mask: Tensor, episode: Tensor, *, steps: Count
) -> Tensor:
    """Leave out episodes with a token more than `steps` versions older than the newest of the batch."""
    if not len(versions):
        return torch.ones_like(kept)
    newest = int(versions.max())
    by_row = torch.where(mask, versions, newest).amin(-1)
    oldest = torch.full_like(groups, newest).scatter_reduce(0, episode, by_row, "amin")
    return on_policy(oldest, newest, max_staleness=steps)
