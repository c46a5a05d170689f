"""Monte-Carlo state values: choose states, average the returns of episodes continued from them.

Kazemnejad et al. 2024 (arXiv 2410.01679): the value of a state is the mean return of K episodes that are continued from
it. Here states are the boundaries of turns. Nothing in this file runs an episode: a backend does, between `plan` and
`StateValuePlan.values`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from agent_rl.config import Section
from agent_rl.core.episode import Episode
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class StateValueConfig(Section):
    """How states are valued."""

    continuations: int = Field(4, ge=1)
    """Episodes per state, K; the paper has 9."""
    max_episodes: int = Field(0, ge=0)
    """At most so many in a step. States are valued whole or not at all: first those that episodes began in, then the
    others in an order that the step's seed draws. A state that is not valued is no boundary: its turn is judged
    together with the one before it (`advantages.turn.from_state_values`); a turn that no valued state comes before has
    no advantage. With room for all beginnings there is none."""


@dataclass(frozen=True, slots=True)
class ContinuationStart:
    """One continuation to run: the episode and turn to start from, and its seed."""

    episode: int
    turn: int
    seed: int


State = tuple[tuple[int, int], ...]
"""Every `(episode, turn)` of the step that was taken in it."""


@dataclass(frozen=True, slots=True)
class StateValuePlan:
    """The states of a step, and the episodes that value some of them."""

    states: tuple[State, ...]
    valued: tuple[int, ...]
    """The states to value, by their places in `states`."""
    starts: tuple[ContinuationStart, ...]
    """What to run: the same number for each valued state, in their order; in turn from the places where it was met."""

    def values(
        self, continued: Sequence[Episode], shape: tuple[int, int], *, gamma: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Average what the continuations earned, discounted by `gamma` per turn.

        Args:
            continued: the episodes that `starts` asked for, in order; one that is not scored leaves the mean.
            shape: the episodes of the step, and the turns of its longest.
            gamma: the discount.

        Returns:
            The value of the state in which each turn was taken, float64 `[E, K]`, NaN where it is not known; and
            metrics (`vine/...`): how many states there were, how many have a value, how many episodes it took, how many
            of them are not scored, and how many turns have no advantage for want of a value.
        """
        values = torch.full(shape, math.nan, dtype=torch.float64)
        each = len(self.starts) // max(1, len(self.valued))
        known = 0
        for number, index in enumerate(self.valued):
            own = slice(number * each, (number + 1) * each)
            returns = [return_from(e, s.turn, gamma) for e, s in zip(continued[own], self.starts[own], strict=True)]
            scored = [value for value in returns if value is not None]
            known += bool(scored)
            for episode, turn in self.states[index] if scored else ():
                values[episode, turn] = math.fsum(scored) / len(scored)
        judged = values.isfinite().long().cumsum(-1) > 0
        return values, {
            "vine/states": float(len(self.states)),
            "vine/valued": float(known),
            "vine/episodes": float(len(continued)),
            "vine/unscored": float(sum(e.reward is None for e in continued)),
            "vine/unjudged": float(sum(not judged[place] for state in self.states for place in state)),
        }


def plan(
    episodes: Sequence[Episode], wanted: Sequence[bool], config: StateValueConfig, rng: np.random.Generator
) -> StateValuePlan:
    """Find the states of the wanted episodes and choose, within the budget, which to value.

    Turns of a group were taken in the same state if `Env.state_hash` said the same. Where it says nothing, they were if
    the policy had seen the same token ids: the beginning at least is then shared. A turn that began with a summary
    would be continued after it: its value would be the summary's, which then had no advantage. It is no boundary.
    """
    met: dict[tuple[str, str | bytes], list[tuple[int, int]]] = {}
    for index, episode in enumerate(episodes):
        for turn, step in enumerate(episode.steps if wanted[index] else ()):
            seen = [ids for t in episode.trajectories if (ids := t.before(turn)) is not None]
            if len(seen) == 1:  # two after a summary
                key = seen[0].tobytes() if step.state is None else step.state
                met.setdefault((episode.group_id, key), []).append((index, turn))
    states = tuple(tuple(places) for places in met.values())
    beginnings = {i for i, places in enumerate(states) if any(turn == 0 for _, turn in places)}
    order = [*sorted(beginnings), *(i for i in rng.permutation(len(states)).tolist() if i not in beginnings)]
    valued = tuple(order[: config.max_episodes // config.continuations])
    starts = []
    for places in (states[index] for index in valued):
        for number in range(config.continuations):
            episode_index, turn = places[number % len(places)]
            starts.append(ContinuationStart(episode_index, turn, int(rng.integers(2**62))))
    return StateValuePlan(states, valued, tuple(starts))


def return_from(episode: Episode, turn: int, gamma: float) -> float | None:
    """Return what an episode earned from a turn on, discounted once per turn; None if it is not scored.

    A reward for the whole episode falls on its last turn, as it does in training.
    """
    if episode.reward is None:
        return None
    last = episode.turns - 1
    late = [(r, last if r.turn is None else r.turn) for r in episode.rewards if r.value is not None]
    return math.fsum(gamma ** (at - turn) * r.weight * (r.value or 0.0) for r, at in late if at >= turn)
