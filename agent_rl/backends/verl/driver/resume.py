"""Resume: what a run on verl keeps beside verl's checkpoints, and how its record returns to one of them.

verl restores the weights, the optimizer, the place in the data and, in asynchronous modes, the waiting episodes. A
killed run has also stored episodes and metrics of later steps. These steps will run again, with other random numbers:
what was stored of them is cut.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import numpy as np

from agent_rl.errors import CheckpointError
from agent_rl.store.episodes import EpisodeWriter, episode_file

STATE = "agent_rl.json"
"""Beside verl's files in a checkpoint."""
METRICS = "metrics.jsonl"


def record_position(checkpoint: Path, store: EpisodeWriter) -> None:
    """Record in a checkpoint the size of the episode file."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / STATE).write_text(json.dumps({"episodes_bytes": store.path.stat().st_size}))


def last_checkpoint(checkpoints: Path) -> int:
    """Return the step of the last whole checkpoint; 0 if there is none."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def rewind_to_checkpoint(folder: Path) -> int:
    """Cut a run's record back to its last checkpoint; return the step.

    What was stored after it is kept in a file beside the episodes, `episodes.jsonl.undone-1` and so on.

    Raises:
        StoreError: if the run is still going.
        CheckpointError: if the checkpoint does not say how much had been stored.
    """
    checkpoints = folder / "checkpoints"
    step, stored = last_checkpoint(checkpoints), 0
    if step:
        state = checkpoints / f"global_step_{step}" / STATE
        if not state.exists():
            raise CheckpointError(f"'{state}' is missing: {checkpoints} was not written by agent_rl's trainer")
        stored = int(json.loads(state.read_text())["episodes_bytes"])
    with EpisodeWriter(episode_file(folder)) as store:  # its lock shows that no other process writes
        _cut(store.path, stored)
    metrics = folder / METRICS
    if metrics.exists():
        lines = metrics.read_bytes().split(b"\n")[:-1]  # a torn last line is none
        kept = [line for line in lines if step and json.loads(line)["step"] <= step]
        new = metrics.with_suffix(".new")
        new.write_bytes(b"".join(line + b"\n" for line in kept))
        new.replace(metrics)
    return step


def _cut(file: Path, size: int) -> None:
    """Cut a file to a size; move the rest into a file beside it."""
    if file.stat().st_size <= size:
        return
    aside = next(path for n in count(1) if not (path := Path(f"{file}.undone-{n}")).exists())
    with file.open("rb+") as handle, aside.open("xb") as rest:
        handle.seek(size)
        shutil.copyfileobj(handle, rest)
        rest.flush()
        os.fsync(rest.fileno())
        handle.truncate(size)


class MetricsFile:
    """One of verl's loggers: `metrics.jsonl`; verl's own file logger empties it when a run is resumed."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Append a line, `{"step": ..., "data": {...}}`; infinite numbers and NaN become null."""
        numbers = {name: _number(value) for name, value in data.items()}
        self._file.write(json.dumps({"step": step, "data": numbers}).encode() + b"\n")

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


def _number(value: float | np.generic) -> float | None:
    number: float = value.item() if isinstance(value, np.generic) else value
    return number if math.isfinite(number) else None
