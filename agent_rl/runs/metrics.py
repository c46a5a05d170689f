"""metrics.jsonl: one JSON object a line, written once for each key, so that a resumed run counts nothing twice."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, StoreError
from agent_rl.runs.folder import METRICS
from agent_rl.store.tail import heal

if TYPE_CHECKING:
    from pandas import DataFrame

    from agent_rl.runs.writers import Writers

T = TypeVar("T")
Row: TypeAlias = dict[str, JSON]
Number: TypeAlias = float | int | str | np.generic
KEY = ("kind", "step", "split", "sampling")
"""The fields that tell one row from another."""
WALL = "wall_s"
"""The field of how many seconds the run had taken."""
WARM_START = ("demonstrations", "copying", "cloning")
"""The kinds of rows from before the first step; their steps are others."""


class Metrics(list[Row]):
    """Rows of metrics, each a plain dict."""

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return a metric as (step, value), without the rows that lack it."""
        return [(int(str(row["step"])), float(str(row[name]))) for row in self if row.get(name) is not None]

    @property
    def wall_s(self) -> float:
        """Seconds that the run took up to its last row, in all of its processes; 0 of an older version's run."""
        return max((float(str(row.get(WALL, 0.0))) for row in self), default=0.0)

    def _repr_html_(self) -> str:
        from agent_rl.view.notebook import show_rows

        return show_rows(self)

    def to_pandas(self) -> DataFrame:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
            ConfigError: if pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ConfigError("to_pandas needs pandas: pip install pandas") from error
        return DataFrame(list(self))


def read_metrics(path: Path) -> Metrics:
    """Return the rows of a metrics file; without a torn last line, as a kill leaves.

    Runs on verl once wrote `{"step": ..., "data": {...}}`; such a line is read as a row of its kind.
    """
    if not path.exists():
        return Metrics()
    lines = path.read_bytes().split(b"\n")[:-1]
    return Metrics(row for at, line in enumerate(lines, start=1) if line for row in _rows(_parse(path, at, line)))


def _parse(path: Path, at: int, line: bytes) -> dict[str, JSON]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise StoreError(f"{path}:{at} is damaged: {error}; remove the line") from error
    if not isinstance(row, dict):
        raise StoreError(f"{path}:{at} is damaged: it is no JSON object; remove the line")
    return row


def rewind_metrics(path: Path, step: int) -> None:
    """Drop the rows after a step from a file, for step 0 all but those of a warm start: the run begins there again."""
    rows = read_metrics(path)
    kept = [row for row in rows if row["kind"] in WARM_START or (step and int(str(row["step"])) <= step)]
    if path.exists():
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        new.replace(path)


class MetricsFile:
    """Appends rows to a run's metrics.jsonl, and hands each to the run's writers."""

    def __init__(self, folder: Path, writers: Writers | None = None) -> None:
        """Open the file, and heal it."""
        self._path = folder / METRICS
        rows = read_metrics(self._path)
        self._seen = {_key(row) for row in rows}
        self._began = time.monotonic() - rows.wall_s
        with self._path.open("ab+") as file:
            heal(file.fileno(), self._path)
        self._writers = writers

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken: this process, and those before it up to their last row."""
        return time.monotonic() - self._began

    def rewind(self, step: int) -> None:
        """Drop the rows after a step, as `rewind_metrics` does, so that they can be written again."""
        rewind_metrics(self._path, step)
        self._seen = {_key(row) for row in read_metrics(self._path)}

    def write(self, kind: str, step: int, values: Mapping[str, Number]) -> None:
        """Append a row, unless the file has it already. What is not finite becomes null."""
        plain = {name: _plain(value) for name, value in values.items()}
        row: Row = {"kind": kind, "step": step, WALL: round(self.wall_s, 1), **plain}
        if _key(row) in self._seen:
            return
        self._seen.add(_key(row))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._writers is not None:
            self._writers.write(kind, step, plain)

    def close(self) -> None:
        """Finish what the writers write."""
        if self._writers is not None:
            self._writers.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def rows_of_verl(data: Mapping[str, T]) -> Iterator[tuple[str, dict[str, T]]]:
    """Yield the kind and the values of each row for one report of verl's: `train`, and `validation` for evaluations."""
    for kind, is_validation in (("train", False), ("validation", True)):
        values = {name: value for name, value in data.items() if name.startswith("val-") == is_validation}
        if values:
            yield kind, values


def _rows(line: dict[str, JSON]) -> Iterator[Row]:
    data = line.get("data")
    if "kind" in line or not isinstance(data, dict):
        yield line
    else:
        yield from ({"kind": kind, "step": line["step"], **values} for kind, values in rows_of_verl(data))


def _plain(value: Number) -> JSON:
    plain: JSON = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def _key(row: Row) -> tuple[JSON, ...]:
    return tuple(row.get(k) for k in KEY)
