"""A run that may still be under way: the heads of its episodes and its metrics, as far as they are written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON
from agent_rl.errors import StoreError
from agent_rl.store.codec import load_line
from agent_rl.store.episodes import episode_at
from agent_rl.store.shards import Place, Shard, digest_of, read_from, shards_of, state_of
from agent_rl.view.decoding import Decode, load_decoder
from agent_rl.view.page.data import head_row, metrics_json

_log = logging.getLogger(__name__)
_AT_ONCE = 2000
"""Episodes after which those read are shown, while more are read."""


class _Read(NamedTuple):
    """How far a shard was read."""

    state: str
    """Its file's when it was read to the end."""
    stop: int
    """Where the last line that was read ends."""
    last: int
    """Where it begins."""
    line: bytes
    """Its digest: it says whether the shard is still the same."""


class Followed:
    """What is known of a run; one thread reads on, and any number ask."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Mapping[str, JSON]] = []
        self.places: dict[str, Place] = {}
        self.metrics: list[JSON] = []
        self.version = 0
        """How often the metrics were read."""
        self.begun = 0
        """How often all episodes were read anew, as a resumed run had cut some off."""
        self.is_closed = False
        self._decode: Decode | None = None
        self._read: dict[str, _Read] = {}
        self._stamp: tuple[int, int] | None = None
        self._changed = threading.Condition()

    def follow(self, seconds: float = 0.5) -> None:
        """Read until it is closed; look again after so many seconds."""
        while not self.is_closed:
            self.read()
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed, timeout=seconds)

    def read(self) -> None:
        """Read what was written since the last call."""
        if self.path.exists():
            self.path = self.path.resolve()  # runs/latest stays the run that it was
        metrics = (self.path if self.path.is_dir() else self.path.parent) / "metrics.jsonl"
        try:
            stat = metrics.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            stamp = None
        if stamp != self._stamp:
            rows = metrics_json(self.path)
            with self._changed:
                self._stamp, self.metrics, self.version = stamp, rows, self.version + 1
                self._changed.notify_all()
        shards = shards_of(self.path)
        if not self._is_continued(shards):
            with self._changed:
                self.rows, self.places, self._read, self.begun = [], {}, {}, self.begun + 1
                self._changed.notify_all()
        for shard in shards:
            self._read_shard(shard)

    def counts(self) -> dict[str, JSON]:
        """Return how much there is: a page compares it with what it has."""
        return {"begun": self.begun, "heads": len(self.rows), "metrics": self.version}

    def wait(self, known: Mapping[str, JSON] | None, seconds: float) -> dict[str, JSON]:
        """Return the counts as soon as they are others than those known, or the run is closed, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self.counts() != known, timeout=seconds)
            return self.counts()

    def episode(self, id: str) -> Episode | None:
        """Return an episode that was read, or None."""
        place = self.places.get(id)
        return None if place is None else episode_at(self.path, place)

    def decode(self) -> Decode | None:
        """Return the decoder of the run's ids, which a run under way may not have yet."""
        self._decode = self._decode or load_decoder(self.path)
        return self._decode

    def close(self) -> None:
        """End `follow` and all that wait."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _is_continued(self, shards: Sequence[Shard]) -> bool:
        """Return whether what was read is still there."""
        there = {shard.name: shard for shard in shards}
        for name, read in self._read.items():
            if name not in there:
                return False
            if state_of(there[name]) != read.state:
                try:
                    line = next((line for _, line in read_from(there[name], read.last)), b"")
                except FileNotFoundError:  # removed meanwhile
                    return False
                if digest_of(line) != read.line:
                    return False
        return True

    def _read_shard(self, shard: Shard) -> None:
        found: list[tuple[Place, Mapping[str, JSON]]] = []
        state, before = state_of(shard), self._read.get(shard.name)
        if before is not None and before.state == state:
            return
        try:
            for place, line in read_from(shard, before.stop if before else 0):
                self._read[shard.name] = _Read("", place.offset + len(line), place.offset, digest_of(line))
                try:
                    found.append((place, head_row(load_line(line))))
                except StoreError as error:
                    _log.warning("%s, byte %d is left out: %s", shard.path, place.offset, error)
                if len(found) >= _AT_ONCE:
                    self._add(found)
                    found = []
                if self.is_closed:
                    return
            if shard.name in self._read:
                self._read[shard.name] = self._read[shard.name]._replace(state=state)
        except FileNotFoundError:  # removed meanwhile
            return
        finally:
            self._add(found)

    def _add(self, found: list[tuple[Place, Mapping[str, JSON]]]) -> None:
        if not found:
            return
        with self._changed:
            for place, row in found:
                if self.places.setdefault(str(row["id"]), place) == place:
                    self.rows.append(row)
            self._changed.notify_all()
