"""Branch: a turn of an earlier episode to run on from."""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.errors import ConfigError
from agent_rl.policy.base import Prefix
from agent_rl.types import Episode


@dataclass(frozen=True, slots=True)
class Branch:
    """Where an episode leaves an earlier one: right before the policy's reply of a turn.

    Raises:
        ConfigError: if there was no such turn, no snapshot was taken before it, or the policy sampled nothing in it.
    """

    episode: Episode
    turn: int
    seed: int
    """Of what the policy samples from there on; the environment's random numbers go on as its snapshot has them."""

    def __post_init__(self) -> None:
        episode, turn = self.episode, self.turn
        if not 0 <= turn < episode.turns:
            raise ConfigError(f"episode {episode.id!r} has {episode.turns} turns, counted from 0: there is no {turn}")
        if turn >= len(episode.snapshots):
            raise ConfigError(
                f"episode {episode.id!r} has no snapshot before turn {turn}: run it with Job(snapshots=True), and "
                "continue it in the same process, as snapshots are not stored"
            )
        if not any(t.before(turn) is not None for t in episode.trajectories):
            raise ConfigError(
                f"episode {episode.id!r} sampled no token in turn {turn}: continue it where it did, or its parent"
            )

    @property
    def snapshot(self) -> object:
        """The environment's state before the turn."""
        return self.episode.snapshots[self.turn]

    @property
    def tool_calls(self) -> int:
        """How many calls were made before the turn."""
        return sum(len(m.tool_calls) for m in self.prefix.messages)

    @property
    def prefix(self) -> Prefix:
        """The dialogue before the turn. In a fork it is the fork's ids: those that the engine had seen by then."""
        episode, turn = self.episode, self.turn
        seen = next(ids for t in episode.trajectories if (ids := t.before(turn)) is not None)
        later = sum(1 + step.messages for step in episode.steps[turn:])
        return Prefix(episode.messages[: len(episode.messages) - later], tuple(seen.tolist()), turn)
