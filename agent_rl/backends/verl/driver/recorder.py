"""Recorder: stores the episodes of evaluations, of which verl keeps the scores only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from agent_rl.core.episode import Episode
from agent_rl.store.episodes import EpisodeWriter, episode_ids

EVALUATIONS = "val"
"""The part of verl's queue that evaluations go through."""


class Recorder:
    """Stands in front of verl's replay buffer, whose place it takes in the trainer.

    verl clears the rows of an evaluation as soon as it has read their scores; here is where they come by before that.
    Training episodes go their way: the trainer stores them when it has checked them.
    """

    def __init__(self, buffer: Any, store: EpisodeWriter, carried: Callable[[Any], Iterable[Episode | None]]) -> None:
        """Take note of where things are.

        Args:
            buffer: verl's `ReplayBuffer`, or what already stands in front of it.
            store: where episodes go.
            carried: fetches the episodes of the rows that `buffer` returned.
        """
        self._buffer, self._store, self._carried = buffer, store, carried
        self._known = episode_ids(store.path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sample as verl does, and store what an evaluation ran; a resumed run, which repeats one, stores it once."""
        batch, metrics = self._buffer.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id == EVALUATIONS:
            for episode in self._carried(batch):
                if episode is not None and episode.id not in self._known:
                    self._store.write(episode)
                    self._known.add(episode.id)
            self._store.flush()
        return batch, metrics
