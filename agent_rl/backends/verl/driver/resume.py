"""Resume: what a run on verl keeps beside verl's checkpoints, and how its record returns to one of them.

verl restores the weights, the optimizer, the place in the data and, in asynchronous modes, the waiting episodes. A
killed run has also stored episodes and metrics of later steps. These steps will run again, with other random numbers:
what was stored of them is cut.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.core.messages import JSON
from agent_rl.errors import CheckpointError
from agent_rl.runs.folder import CONFIG, METRICS
from agent_rl.runs.metrics import MetricsFile, read_metrics, rewind_metrics, rows_of_verl
from agent_rl.runs.writers import WriterName, Writers
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.shards import Place
from agent_rl.store.token_records import TOKEN_RECORDS, TokenRecordWriter

_log = logging.getLogger(__name__)

START = Place("episodes-00001", 0)
STATE = "agent_rl.json"
"""Beside verl's files in a checkpoint."""


def record_position(checkpoint: Path, store: EpisodeWriter) -> None:
    """Record in a checkpoint where the next episode will be stored."""
    _log.info("a checkpoint is written to %s", checkpoint)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / STATE).write_text(json.dumps({"episodes": store.position}))


def last_checkpoint(checkpoints: Path) -> int:
    """Return the step of the last whole checkpoint; 0 if there is none."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def owes_evaluation(folder: Path, config: VerlConfig, step: int) -> bool:
    """Return whether the weights of a step are to be evaluated, and were not: verl writes their checkpoint before."""
    due = step in (0, config.steps) or step % (config.eval.every or config.steps) == 0
    return due and not any(r["kind"] == "validation" and r["step"] == step for r in read_metrics(folder / METRICS))


def rewind_to_checkpoint(folder: Path) -> int:
    """Cut a run's record back to its last checkpoint; return the step.

    What was stored after it is kept in a file beside the episodes, `episodes.jsonl.undone-1` and so on.

    Raises:
        StoreError: if the run is still going.
        CheckpointError: if the checkpoint does not say how much had been stored.
    """
    checkpoints = folder / "checkpoints"
    step, stored = last_checkpoint(checkpoints), START
    if step:
        state = checkpoints / f"global_step_{step}" / STATE
        if not state.exists():
            raise CheckpointError(f"'{state}' is missing: {checkpoints} was not written by agent_rl's trainer")
        found = json.loads(state.read_text())
        stored = Place(*found["episodes"]) if "episodes" in found else START._replace(offset=found["episodes_bytes"])
    with EpisodeWriter(folder) as store:  # its lock shows that no other process writes
        store.cut(stored)
    if (folder / TOKEN_RECORDS).exists():
        with TokenRecordWriter(folder) as records:
            records.rewind(step)
    rewind_metrics(folder / METRICS, step)
    _log.info("the record in %s ends with the checkpoint of step %d", folder, step)
    return step


def open_metrics(folder: Path, report_to: Sequence[WriterName]) -> MetricsFile:
    """Open the metrics of the run in a folder, and the writers that get them, too."""
    shown = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))  # not resolved: secrets stay references
    return MetricsFile(folder, Writers(report_to, folder, cast(Mapping[str, JSON], shown), print))


class MetricsLogger:
    """One of verl's loggers: writes what verl reports to metrics.jsonl."""

    def __init__(
        self,
        metrics: MetricsFile,
        observe: Callable[[Mapping[str, float]], Mapping[str, float]],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin.

        Args:
            metrics: the file.
            observe: gets what is reported of each training step, and returns what to add.
            check: is called when a training step is written, and may end the run.
        """
        self._metrics, self._observe, self._check = metrics, observe, check

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Write what verl reports of a step.

        Raises:
            InfrastructureError: if the check ends the run.
        """
        rows = dict(rows_of_verl(data))
        for kind, values in rows.items():
            found = self._observe(values) if kind == "train" else {}
            self._metrics.write(kind, step, {**values, **found})
        if "train" in rows:
            self._check()

    def finish(self) -> None:
        """Close the file."""
        self._metrics.close()
