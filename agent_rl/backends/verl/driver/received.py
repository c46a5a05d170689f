"""A batch as it comes back from verl's queue: its episodes, and where each of verl's rows belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agent_rl.algorithms import Algorithm, Experience
from agent_rl.backends.verl.worker.rows import episode_of
from agent_rl.core.episode import Episode, group_episodes


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A batch as it came back from verl's queue: its episodes, and where each of verl's rows belongs."""

    episodes: list[Episode]
    places: list[tuple[int, int] | None]
    """By row: episode and number of its row; None for verl's padding."""
    greedy: Sequence[Episode] = ()
    """Episodes of the same groups that took the likeliest tokens, where the algorithm asked for them."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """By episode id: what is to be expected from the state before each turn on, `[K]`, where it was asked for."""

    def experience(self, algorithm: Algorithm) -> Experience:
        """Return what an algorithm learns from."""
        x = algorithm.experience(group_episodes(self.episodes, self.greedy))
        if not self.values:
            return x
        return replace(x, state_values=torch.stack([self.values[e.id] for e in self.episodes]))


def receive(keys: Sequence[str], extra_fields: Sequence[dict[str, Any]], padding: Sequence[bool]) -> ReceivedBatch:
    """Read the episodes that the rows of a batch carry; keys are verl's `{prompt}_{session}_{number}`.

    Episodes are in the order of their ids, whatever order they ended in: of two that are equally good, the first counts
    as the better one.
    """
    carried = {
        key.rpartition("_")[0]: episode
        for key, fields, is_padding in zip(keys, extra_fields, padding, strict=True)
        if not is_padding and (episode := episode_of(fields)) is not None
    }
    sessions = sorted(carried, key=lambda session: carried[session].id)
    index = {session: number for number, session in enumerate(sessions)}
    places = [
        None if is_padding else (index[key.rpartition("_")[0]], int(key.rpartition("_")[2]))
        for key, is_padding in zip(keys, padding, strict=True)
    ]
    return ReceivedBatch([carried[session] for session in sessions], places)


def own_rows(x: Experience, received: ReceivedBatch) -> list[int | None]:
    """Find the rows of `x` that verl's rows came from; None for padding and for blank rows."""
    firsts: dict[int, int] = {}
    for row, episode in enumerate(x.rows.episode.tolist()):
        firsts.setdefault(episode, row)
    return [None if p is None or p[0] not in firsts else firsts[p[0]] + p[1] for p in received.places]
