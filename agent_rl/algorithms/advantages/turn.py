"""Advantages of turns: one number for all tokens that the policy sampled in a turn.

`turns` is int64 `[B, T]`, the turn of each token: in a row it never decreases, and it is read at sampled tokens
(`mask`) only. A turn in which a row sampled nothing is no step of it. `rewards` may be anywhere in a row; `gamma`
discounts per turn in which it sampled something. Results are float64 and carry no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_rl.algorithms.advantages.episode import group_relative
from agent_rl.algorithms.advantages.estimate import TurnAdvantages
from agent_rl.algorithms.advantages.token import gae, returns_to_go, settle
from agent_rl.algorithms.components import Fraction, NotNegative, advantage
from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def spread(per_turn: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
    """Give each sampled token the number of its turn, `[B, K]` → `[B, T]`; 0 elsewhere.

    Raises:
        ConfigError: if a sampled token's turn has no column.
    """
    count = _turn_count(turns, mask)
    if count > per_turn.shape[-1]:
        raise ConfigError(
            f"a sampled token is in turn {count - 1}, but there are numbers for {per_turn.shape[-1]} turns; "
            "give one column per turn, counted from 0"
        )
    if not count:
        return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    return torch.where(mask, per_turn.detach().double().gather(-1, torch.where(mask, turns, 0)), 0.0)


def turn_starts(turns: Tensor, mask: Tensor) -> Tensor:
    """Where a turn begins, bool `[B, T]`: at its first sampled token. The critic of `turn_gae` is trained there."""
    latest = torch.where(mask, turns, -1).cummax(-1).values
    return mask & (turns != torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1))


@advantage(
    "turn-returns",
    formula="A_t = sum_{k>=turn(t)} gamma^(k-turn(t)) r_k",
    source="ROLL, segment-wise",
    layout="lines",
)
def turn_returns(rewards: Tensor, mask: Tensor, turns: Tensor, *, gamma: Fraction = 1.0) -> Tensor:
    """Returns with one discount per turn, `G_k = r_k + gamma G_{k+1}`, on all sampled tokens of turn `k`.

    `r_k` is the sum of all rewards that `settle` puts in the turn. ROLL's segment-wise return
    (compute_agentic_reinforce_return) discounts alike but reads only the reward on a segment's last token, and takes
    each unbroken run of sampled tokens for a segment, even when a turn has several.
    """
    per_turn, present = _rewards(rewards, mask, turns)
    return spread(returns_to_go(per_turn, present, gamma=gamma), turns, mask)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turns: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """GAE with turns as the steps: the state's value is the critic's at the first sampled token of the turn.

    `values`, `[B, T]`, are read only where `turn_starts`. Returns advantages and returns, `[B, T]`, a turn's on all its
    sampled tokens.
    """
    per_turn, present = _rewards(rewards, mask, turns)
    starts = turn_starts(turns, mask)
    at_start = _sum_by_turn(values.detach().double(), starts, turns, present.shape[-1])
    advantages, returns = gae(per_turn, at_start, present, gamma=gamma, lam=lam)
    return spread(advantages, turns, mask), spread(returns, turns, mask)


@advantage(
    "step-grouped",
    formula="A_k = norm_group(R) + omega * norm_state(G_k), G_k = r_k + gamma G_{k+1}, norm(x) = x - mean [/ std]",
    source="GiGPO, Feng et al. 2025, 2505.10978, eq. 8",
)
def step_grouped(
    scores: Tensor,
    groups: Tensor,
    turn_rewards: Tensor,
    turn_sampled: Tensor,
    states: Tensor,
    *,
    gamma: Fraction = 0.95,
    omega: NotNegative = 1.0,
    std: bool = True,
    eps: NotNegative = 1e-6,
) -> TurnAdvantages:
    """GiGPO: compare episodes of a task, and the turns that they took in the same state (Feng et al. 2025).

    `A = A_episode + omega A_step` (arXiv 2505.10978, eq. 8): `group_relative` of the scores within the group, and of
    the returns from the turn on, within the turns of the group that were taken in the same state. A state that was met
    once adds 0. verl-agent by default takes mean and deviation over the scores of all turns, so that long episodes
    weigh more; here an episode counts once, as in the paper. ROLL groups turns by the state's hash alone, across tasks.
    `std` divides both parts by the deviation of what is compared (the paper's F_norm = std; False for F_norm = 1).

    Raises:
        ConfigError: if the environment did not say in which state a turn was taken.
    """
    nameless = int((states[turn_sampled & scores.isfinite()[:, None]] < 0).sum())
    if nameless:
        raise ConfigError(
            f"advantage 'step-grouped' compares turns that were taken in the same state, but {nameless} turns have "
            "none: let the environment define state_hash(self), or use another advantage"
        )
    returns = returns_to_go(turn_rewards, turn_sampled, gamma=gamma)
    episode, _ = turn_sampled.nonzero(as_tuple=True)
    by_episode = group_relative(scores.detach(), groups, std=std, eps=eps)[episode]
    # an episode that is not scored has no part in the statistics of its states either
    known = returns[turn_sampled].masked_fill(by_episode.isnan(), torch.nan)
    _, anchors = torch.unique(torch.stack([groups[episode], states[turn_sampled]], -1), dim=0, return_inverse=True)
    advantages = torch.zeros_like(returns)
    advantages[turn_sampled] = by_episode + omega * group_relative(known, anchors, std=std, eps=eps)
    return TurnAdvantages(advantages)


@advantage(
    "state-values",
    formula="A_k = r_k + gamma V_{k+1} - V_k, V_k = mean return of continuations from before turn k",
    source="VinePPO, Kazemnejad et al. 2024, 2410.01679",
)
def from_state_values(
    turn_rewards: Tensor, turn_sampled: Tensor, state_values: Tensor, *, gamma: Fraction = 1.0
) -> TurnAdvantages:
    """VinePPO at turn boundaries: `A_k = r_k + gamma V_{k+1} - V_k` (Kazemnejad et al. 2024, arXiv 2410.01679).

    The paper's steps are lines of reasoning and `gamma` is 1; here a step is a turn. V_k is the mean return of
    continuations sampled from the state before the turn, NaN where it is not known; 0 after the last turn. A state
    without a value is no boundary: all turns from a valued state `m` to the next, `n`, are one step, and each has its
    advantage, `sum_{m<=j<n} gamma^(j-m) r_j + gamma^(n-m) V_n - V_m`: NaN before the first valued state.
    """
    # a turn in which nothing was sampled is one all the same where a later one follows
    inside = turn_sampled.flip(-1).cummax(-1).values.flip(-1)
    rewards = torch.where(inside, turn_rewards.detach().double(), 0.0)
    values = state_values.detach().double().masked_fill(~inside, torch.nan)
    known = values.isfinite()
    # going back: what is earned up to the next valued state, and its value
    advantages = torch.full_like(values, torch.nan)
    ahead = values.new_zeros(len(values))
    for k in reversed(range(values.shape[-1])):
        ahead = rewards[:, k] + gamma * ahead
        advantages[:, k] = ahead - values[:, k]
        ahead = torch.where(known[:, k], values[:, k], ahead)
    for k in range(1, values.shape[-1]):
        advantages[:, k] = torch.where(known[:, k], advantages[:, k], advantages[:, k - 1])
    return TurnAdvantages(advantages.masked_fill(~inside, torch.nan))


def _turn_count(turns: Tensor, mask: Tensor) -> int:
    sampled = turns[mask]
    if not sampled.numel():
        return 0
    if int(sampled.min()) < 0:
        raise ConfigError(f"a sampled token is in turn {int(sampled.min())}; turns are counted from 0")
    return int(sampled.max()) + 1


def _sum_by_turn(x: Tensor, where: Tensor, turns: Tensor, count: int) -> Tensor:
    out = x.new_zeros(len(x), count)
    return out.scatter_add(-1, torch.where(where, turns, 0), torch.where(where, x, 0.0))


def _rewards(rewards: Tensor, mask: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """The rewards settled in each turn, float64 `[B, K]`, and whether the row sampled anything in it."""
    count = max(1, _turn_count(turns, mask))
    settled = settle(rewards, mask)
    present = _sum_by_turn(torch.ones_like(settled), mask, turns, count) > 0
    return _sum_by_turn(settled, mask, turns, count), present
