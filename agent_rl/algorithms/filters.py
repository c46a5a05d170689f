"""Filters: which episodes are worth a gradient, and which groups are worth a place in the batch.

A filter returns a bool mask `[E]`, True for the episodes to keep; filters combine with `&`. It changes nothing else: a
dropped episode keeps its place in its group's statistics. Whether it still counts in the denominators of the loss is
decided by which episodes the caller counts there; systems differ, so every filter says what they do. A NaN score or
advantage is an episode that is not scored.

Dynamic sampling (DAPO) samples until enough groups passed: `DynamicSampling` is its bookkeeping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    varied; verl keeps it. DAPO fills the batch up with other groups (`DynamicSampling`) and counts only kept ones.

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


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """How far dynamic sampling has come in filling one batch with groups that are worth training on.

        state, groups = Refill(target=32), []
        while n := next_round(state):
            groups += (new := sample(n))
            state = offer(state, [varied(group) for group in new])
        batch = [groups[i] for i in state.taken]

    It always ends, at the latest after `max_rounds`, and never by raising: a batch that is not full is smaller, not the
    end of the run (verl raises after `max_num_gen_batches`, DAPO#22).
    """

    target: int
    """How many groups the batch needs."""
    max_rounds: int = 10
    oversampling: float = 3.0
    """A round samples at most this times `target` groups, however few were accepted."""
    expected_rate: float = 1.0
    """The share of groups expected to pass before any were seen, e.g. that of the step before; weighs as one group."""
    rounds: int = 0
    offered: int = 0
    accepted: int = 0
    """How many of the offered groups were worth training on, taken or not."""
    taken: tuple[int, ...] = ()
    """The groups of the batch: positions among all offered groups in order, first come, first served."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: if `target` or `max_rounds` is below 1, `oversampling` below 1 or infinite, or `expected_rate`
                not in (0, 1].
        """
        if self.target < 1 or self.max_rounds < 1:
            raise ConfigError(f"target={self.target} and max_rounds={self.max_rounds} must both be at least 1")
        if not 1 <= self.oversampling < math.inf:
            raise ConfigError(f"oversampling={self.oversampling} must be at least 1 and finite; 1 for none")
        if not 0 < self.expected_rate <= 1:
            raise ConfigError(
                f"expected_rate={self.expected_rate} must be above 0 and at most 1; 1 if nothing is known"
            )

    @property
    def leftover(self) -> int:
        """How many accepted groups came after the batch was full, or after sampling had ended."""
        return self.accepted - len(self.taken)

    @property
    def reason(self) -> str | None:
        """Why sampling ended; None while it goes on."""
        if len(self.taken) == self.target:
            return "full"
        if self.rounds >= self.max_rounds:
            return f"gave up after {self.rounds} rounds with {len(self.taken)} of {self.target} groups"
        return None


def next_round(state: DynamicSampling) -> int:
    """Return how many groups to sample now; 0 when sampling has ended.

    As many as are missing, divided by the acceptance rate so far, `(accepted + expected_rate) / (offered + 1)`, but not
    more than `oversampling * target`. verl and slime sample a fixed number of groups every round instead.
    """
    if state.reason is not None:
        return 0
    missing = state.target - len(state.taken)
    likely = missing * (state.offered + 1) / (state.accepted + state.expected_rate)
    return math.ceil(min(likely, int(state.oversampling * state.target)))


def offer(state: DynamicSampling, kept: Sequence[bool]) -> DynamicSampling:
    """Return the state after a round.

    Args:
        state: the state before it; it is not changed.
        kept: one flag per sampled group, in order: whether it is worth training on. There may be fewer or more than
            were asked for. Groups that come after sampling has ended are counted, but not taken.
    """
    ended = state.reason is not None
    positions = [state.offered + i for i, keep in enumerate(kept) if keep]
    missing = 0 if ended else state.target - len(state.taken)
    return replace(
        state,
        rounds=state.rounds + (not ended),
        offered=state.offered + len(kept),
        accepted=state.accepted + len(positions),
        taken=state.taken + tuple(positions[:missing]),
    )
