"""metrics.jsonl: one JSON object a line, appended once per key, so that a resumed run counts nothing twice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeAlias

from agent_rl.core.messages import JSON

Row: TypeAlias = dict[str, JSON]
KEY = ("kind", "step", "split", "sampling")
"""What tells one row from another."""


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file; a torn last line, left by a kill, is not one."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line]


class MetricsLog:
    """Appends rows; mirrors numbers to TensorBoard if it is installed."""

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self._seen = {_key(row) for row in read_metrics(path)}
        if path.exists():  # heal a torn tail before appending to it
            data = path.read_bytes()
            path.write_bytes(data[: data.rfind(b"\n") + 1])
        self._file = path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder)

    def write(self, kind: str, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append a row, unless the file has it already. What is not finite becomes null."""
        row: Row = {"kind": kind, "step": step}
        for name, value in values.items():
            row[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        if _key(row) in self._seen:
            return
        self._seen.add(_key(row))
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            prefix = "/".join(str(row[k]) for k in ("kind", "split", "sampling") if k in row)
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{prefix}/{name}", value, step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _key(row: Row) -> tuple[JSON, ...]:
    return tuple(row.get(k) for k in KEY)


class _Board(Protocol):
    """What is used of TensorBoard's writer."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


def _tensorboard(folder: Path) -> _Board | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    board: _Board = SummaryWriter(str(folder / "tensorboard"))
    return board
