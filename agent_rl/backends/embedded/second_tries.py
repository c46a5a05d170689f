"""Second tries: whether tasks that no episode solved are worth another group, by how often one has succeeded lately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent_rl.core.episode import Episode, EpisodeGroup

RARE = 0.1
"""The share of second tries up to which their successes are a skill. Measured, at a temperature of 2: 0.05 of belt's
tries, whose sixteen turns nobody gets right by luck; 0.22 and 0.27 of lock's and compare's, where one of two answers
is right, and which learn later if such successes are learned from. See benchmarks/unlike.py."""
MEMORY = 0.98
"""What the tries of one step with some count in the next one: the last fifty decide, as one step has few."""


@dataclass
class SecondTries:
    """What became of a run's second tries lately."""

    counts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Successes and episodes of each environment."""

    def choose(self, unsolved: Mapping[int, EpisodeGroup]) -> list[int]:
        """Return which groups' tasks to try again: where successes are luck, one tells whether they still are."""
        probes = dict[str, int]()
        for place, group in unsolved.items():
            probes.setdefault(group.env, place)
        return [at for at, group in unsolved.items() if self.succeed_rarely(group) or at == probes[group.env]]

    def observe(self, episodes: Iterable[Episode]) -> None:
        """Count a step's second tries; those that are not scored say nothing."""
        found = dict[str, list[bool]]()
        for episode in episodes:
            if episode.success is not None:
                found.setdefault(episode.env, []).append(episode.success)
        for env, now in found.items():
            successes, tries = self.counts.get(env, (0.0, 0.0))
            self.counts[env] = (MEMORY * successes + sum(now), MEMORY * tries + len(now))

    def succeed_rarely(self, group: EpisodeGroup) -> bool:
        """Whether its environment's second tries succeed by more than luck; yes until any were made."""
        successes, tries = self.counts.get(group.env, (0.0, 0.0))
        return successes <= RARE * tries
