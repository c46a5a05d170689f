"""Dynamic sampling (DAPO, Yu et al. 2025): sample groups until a batch is full of those that are worth training on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """The state of filling one batch; it runs no episode.

        state, groups = DynamicSampling(target=32), []
        while n := state.groups_to_sample():
            groups += (new := sample(n))
            state = state.update([varied(group) for group in new])
        batch = [groups[i] for i in state.selected]

    It always ends, at the latest after `max_rounds`, and never by raising: a batch that is not full is smaller, not the
    end of the run (verl raises after `max_num_gen_batches`, DAPO#22).
    """

    target: int
    """How many groups the batch needs."""
    max_rounds: int = 10
    oversampling: float = 3.0
    """A round samples at most this times `target` groups, however few were accepted."""
    rounds: int = 0
    sampled: int = 0
    """How many groups were sampled in all rounds."""
    accepted: int = 0
    """How many of the sampled groups were worth training on, selected or not."""
    selected: tuple[int, ...] = ()
    """The groups of the batch: positions among all sampled groups in order, first come, first served."""

    def __post_init__(self) -> None:
        if self.target < 1 or self.max_rounds < 1:
            raise ConfigError(f"target={self.target} and max_rounds={self.max_rounds} must both be at least 1")
        if not 1 <= self.oversampling < math.inf:
            raise ConfigError(f"oversampling={self.oversampling} must be at least 1 and finite; 1 for none")

    @property
    def reason(self) -> str | None:
        """Why sampling ended; None before it has."""
        if len(self.selected) == self.target:
            return "full"
        if self.rounds >= self.max_rounds:
            return f"gave up after {self.rounds} rounds with {len(self.selected)} of {self.target} groups"
        return None

    def groups_to_sample(self) -> int:
        """Return how many groups to sample now; 0 when sampling has ended.

        As many as are missing, divided by the acceptance rate so far, `(accepted + 1) / (sampled + 1)`, but
        not more than `oversampling * target`. verl and slime sample a fixed number of groups every round instead.
        """
        if self.reason is not None:
            return 0
        missing = self.target - len(self.selected)
        likely = missing * (self.sampled + 1) / (self.accepted + 1)
        return math.ceil(min(likely, int(self.oversampling * self.target)))

    def update(self, kept: Sequence[bool]) -> DynamicSampling:
        """Return the state after a round.

        `kept` flags each sampled group, in order: whether it is worth training on. There may be fewer or more flags
        than were asked for. Groups that come after sampling has ended are counted, but not selected.
        """
        ended = self.reason is not None
        positions = [self.sampled + i for i, keep in enumerate(kept) if keep]
        missing = 0 if ended else self.target - len(self.selected)
        return replace(
            self,
            rounds=self.rounds + (not ended),
            sampled=self.sampled + len(kept),
            accepted=self.accepted + len(positions),
            selected=self.selected + tuple(positions[:missing]),
        )
