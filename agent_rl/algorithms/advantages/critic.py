"""Advantages over a critic's values, as choices of a config: GAE with tokens or with turns as the steps.

An episode's rows are one line of decisions here: what its last row earned reaches its first one, and the state after a
row's last sampled token is the one that the next row begins in.

An episode has no value after its end, whatever ended it. Bootstrapping from the critic where a limit cut an episode off
(Pardo et al. 2018, arXiv 1712.00378) is for limits that are no part of the task, with nothing known of what would have
followed. Here the environment has scored what there was, so the limit's price is known and in the reward: a value on
top would be paid out for running into the limit. Who would rather not learn from such episodes drops them with the
filter `not-overlong`; one that is not scored is not trained on, by the policy or the critic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_rl.algorithms.advantages import token, turn
from agent_rl.algorithms.batch import Batch
from agent_rl.algorithms.components import Component, Fraction
from agent_rl.algorithms.experience import Experience


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """Advantages, and what the critic that they were taken over should have said."""

    advantages: Tensor
    """float64 `[B, T]`."""
    returns: Tensor
    """float64 `[B, T]`: the advantages before whitening plus the values, where `valued`; 0 elsewhere."""
    valued: Tensor
    """bool `[B, T]`: where the critic was asked, and is to be trained."""

    @classmethod
    def of(cls, found: Tensor | AdvantageEstimate) -> AdvantageEstimate:
        """Return what an advantage found; one without a critic trains none."""
        if isinstance(found, AdvantageEstimate):
            return found
        return cls(found, torch.zeros_like(found), torch.zeros_like(found, dtype=torch.bool))


def gae(x: Experience, *, gamma: Fraction = 1.0, lam: Fraction = 0.95, whiten: bool = True) -> AdvantageEstimate:
    """GAE over the sampled tokens of an episode; see `token.gae`."""
    lines = _Lines(x.rows)
    rewards, values = lines.join(x.rows.rewards), lines.join(x.rows.values)
    found = token.gae(rewards, values, lines.mask, gamma=gamma, lam=lam)
    return _estimated(x, lines, *found, lines.mask, whiten=whiten)


def turn_gae(x: Experience, *, gamma: Fraction = 1.0, lam: Fraction = 0.95, whiten: bool = True) -> AdvantageEstimate:
    """GAE over the turns of an episode, whose values are those before their first sampled tokens; see `turn_gae`."""
    lines = _Lines(x.rows)
    rewards, values, turns = (lines.join(v) for v in (x.rows.rewards, x.rows.values, x.rows.turns))
    found = turn.turn_gae(rewards, values, lines.mask, turns, gamma=gamma, lam=lam)
    return _estimated(x, lines, *found, turn.turn_starts(turns, lines.mask), whiten=whiten)


WITH_CRITIC: dict[str, Component[Tensor | AdvantageEstimate]] = {
    "gae": Component(
        gae,
        "A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t over sampled tokens [whitened]",
        "GAE, Schulman et al. 2016, eq. 16",
    ),
    "turn-gae": Component(
        turn_gae,
        "A_k = sum_l (gamma lam)^l delta_{k+l}, delta_k = r_k + gamma V_{k+1} - V_k over turns [whitened]",
        "GAE, Schulman et al. 2016, eq. 16, with turns as the steps",
    ),
}
"""The advantages that need a critic, by name."""


class _Lines:
    """The sampled tokens of each episode, over all its rows, in one line `[E, L]`."""

    def __init__(self, batch: Batch) -> None:
        self._mask = batch.loss_mask
        episode = batch.episode[:, None].expand_as(self._mask)[self._mask]
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
        """Put `[E, L]` back where the tokens stand, `[B, T]`; 0 at the others."""
        x = lines.new_zeros(self._mask.shape)
        x[self._mask] = lines[self._line, self._place]
        return x


def _estimated(
    x: Experience, lines: _Lines, advantages: Tensor, returns: Tensor, valued: Tensor, *, whiten: bool
) -> AdvantageEstimate:
    valued = lines.split(valued) & x.trained
    on_tokens = x.scored(lines.split(advantages))
    returns = lines.split(returns)
    return AdvantageEstimate(
        token.whiten(on_tokens, x.trained) if whiten else on_tokens,
        torch.where(valued, returns, returns.new_zeros(())),
        valued,
    )
