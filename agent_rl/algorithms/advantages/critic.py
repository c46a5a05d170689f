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


@advantage(
    "gae",
    formula="A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t over sampled tokens [whitened]",
    source="GAE, Schulman et al. 2016, eq. 16",
)
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    episode: Tensor,
    trained: Tensor,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 0.95,
    whiten: bool = True,
) -> AdvantageEstimate:
    """`token.gae` over the sampled tokens of an episode."""
    lines = _Lines(mask, episode)
    found = token.gae(lines.join(rewards), lines.join(values), lines.mask, gamma=gamma, lam=lam)
    return _estimated(lines, *found, lines.mask, trained, whiten=whiten)


@advantage(
    "turn-gae",
    formula="A_k = sum_l (gamma lam)^l delta_{k+l}, delta_k = r_k + gamma V_{k+1} - V_k over turns [whitened]",
    source="GAE, Schulman et al. 2016, eq. 16, with turns as the steps",
)
def turn_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turns: Tensor,
    episode: Tensor,
    trained: Tensor,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 0.95,
    whiten: bool = True,
) -> AdvantageEstimate:
    """`turn.turn_gae` over the turns of an episode."""
    lines = _Lines(mask, episode)
    numbers = lines.join(turns)
    found = turn.turn_gae(lines.join(rewards), lines.join(values), lines.mask, numbers, gamma=gamma, lam=lam)
    return _estimated(lines, *found, turn.turn_starts(numbers, lines.mask), trained, whiten=whiten)


class _Lines:
    """The sampled tokens of each episode, over all its rows, in one line `[E, L]`."""

    def __init__(self, mask: Tensor, episode: Tensor) -> None:
        self._mask = mask
        episode = episode[:, None].expand_as(mask)[mask]
        # an episode's rows are neighbours, in the order in which they were sampled
        _, self._line, lengths = torch.unique_consecutive(episode, return_inverse=True, return_counts=True)
        self._place = torch.arange(len(episode), device=episode.device) - (lengths.cumsum(0) - lengths)[self._line]
        self.mask = torch.arange(int(lengths.max()), device=episode.device) < lengths[:, None]

    def join(self, x: Tensor) -> Tensor:
        """Lay the sampled tokens of `[B, T]` out, `[E, L]`; 0 behind an episode's end."""
        lines = x.new_zeros(self.mask.shape)
        lines[self._line, self._place] = x[self._mask]
        return lines

    def split(self, lines: Tensor) -> Tensor:
        """Put `[E, L]` back at the tokens' places, `[B, T]`; 0 at the others."""
        x = lines.new_zeros(self._mask.shape)
        x[self._mask] = lines[self._line, self._place]
        return x


def _estimated(
    lines: _Lines, advantages: Tensor, returns: Tensor, valued: Tensor, trained: Tensor, *, whiten: bool
) -> AdvantageEstimate:
    valued = lines.split(valued) & trained
    on_tokens, returns = lines.split(advantages), lines.split(returns)
    return AdvantageEstimate(
        token.whiten(on_tokens, trained) if whiten else on_tokens,
        torch.where(valued, returns, returns.new_zeros(())),
        valued,
    )
