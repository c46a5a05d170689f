"""Advantages over a critic's values: GAE with tokens or with turns as the steps.

An episode's rows are one line of decisions here: what its last row earned reaches its first one, and the state after a
row's last sampled token is the one that the next row begins in.

An episode has no value after its end, whatever ended it. Bootstrapping from the critic where a limit cut an episode off
(Pardo et al. 2018, arXiv 1712.00378) is for limits that are no part of the task, with nothing known of what would have
followed. Here the environment has scored what there was, so the limit's price is known and in the reward:
bootstrapping would reward hitting the limit. The filter `not-overlong` drops such
episodes; one that is not scored is not trained on, by the policy or the critic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_rl.algorithms.advantages import token, turn
from agent_rl.algorithms.advantages.estimate import AdvantageEstimate
from agent_rl.algorithms.components import Fraction, advantage
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def whitened(found: Tensor, trained: Tensor, *, whiten: bool = True) -> Tensor:
    """Whiten advantages over the tokens that are trained on, if asked."""
    return token.whiten(found, trained) if whiten else found


@advantage(
    "gae",
    formula="A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t over sampled tokens [whitened]",
    source="GAE, Schulman et al. 2016, eq. 16",
    layout="lines",
    finish=whitened,
)
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, trained: Tensor, *, gamma: Fraction = 1.0, lam: Fraction = 0.95
) -> AdvantageEstimate:
    """`token.gae` over the sampled tokens of an episode."""
    return _estimate(*token.gae(rewards, values, mask, gamma=gamma, lam=lam), trained)


@advantage(
    "turn-gae",
    formula="A_k = sum_l (gamma lam)^l delta_{k+l}, delta_k = r_k + gamma V_{k+1} - V_k over turns [whitened]",
    source="GAE, Schulman et al. 2016, eq. 16, with turns as the steps",
    layout="lines",
    finish=whitened,
)
def turn_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turns: Tensor,
    trained: Tensor,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 0.95,
) -> AdvantageEstimate:
    """`turn.turn_gae` over the turns of an episode."""
    found = turn.turn_gae(rewards, values, mask, turns, gamma=gamma, lam=lam)
    return _estimate(*found, turn.turn_starts(turns, mask) & trained)


def _estimate(advantages: Tensor, returns: Tensor, valued: Tensor) -> AdvantageEstimate:
    return AdvantageEstimate(advantages, torch.where(valued, returns, returns.new_zeros(())), valued)
