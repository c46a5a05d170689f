"""The table and the verdicts of `benchmarks/sandbox.py`: each measured peer beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Measure(StrEnum):
    """The measures, in the order and the words of the table."""

    CALL = "a Python call in a sandbox that is open, p50 in ms"
    COMMAND = "a command (true) in a sandbox that is open, p50 in ms"
    OPEN = "opening a sandbox, p50 in ms"
    FIRST = "opening a sandbox and its first Python result, p50 in ms"
    IDLE = "memory of an idle sandbox, MB"
    USED = "memory of an idle sandbox that has run Python, MB"
    RATE = "Python calls a second of one process, four sandboxes at once"


MORE_IS_BETTER = frozenset({Measure.RATE})
MEMORY = frozenset({Measure.IDLE, Measure.USED})


@dataclass(frozen=True, slots=True)
class Row:
    """A figure."""

    measure: Measure
    name: str
    value: float
    beside: str | None = None
    """The name of ours that it is compared with; None: it is ours."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for a figure of ours: a lower one if more is better, otherwise an upper one."""

    measure: Measure
    name: str
    limit: float
    beside: str | None = None
    """The peer of whose figure `limit` is a multiple; None: it is a figure itself."""


def merged(rounds: Iterable[Row]) -> list[Row]:
    """Return one row for those of the same thing: the best time or rate, the middle one of the memories."""
    found: dict[tuple[Measure, str], list[Row]] = {}
    for row in rounds:
        found.setdefault((row.measure, row.name), []).append(row)
    return [_merged(measure, rows) for (measure, _), rows in found.items()]


def _merged(measure: Measure, rows: list[Row]) -> Row:
    ranked = sorted(rows, key=lambda row: row.value, reverse=measure in MORE_IS_BETTER)
    return ranked[len(ranked) // 2 if measure in MEMORY else 0]


def advantage(row: Row, rows: Iterable[Row]) -> float | None:
    """Return how many times better ours is than a peer; None if the row is ours, or there is no such number."""
    ours = next((other.value for other in rows if (other.measure, other.name) == (row.measure, row.beside)), None)
    if ours is None or min(ours, row.value) <= 0:
        return None
    return ours / row.value if row.measure in MORE_IS_BETTER else row.value / ours


def table(rows: Sequence[Row]) -> str:
    """Return the figures by measure, ours first, otherwise in the order given."""
    blocks = []
    for measure in Measure:
        group = sorted((row for row in rows if row.measure is measure), key=lambda row: row.beside is not None)
        if group:
            lines = [f"{measure:<73}{'ours / peer' if measure in MORE_IS_BETTER else 'peer / ours':>12}"]
            blocks.append("\n".join(lines + [_line(row, advantage(row, rows)) for row in group]))
    return "\n\n".join(blocks)


def _line(row: Row, times: float | None) -> str:
    line = f"  {row.name:<62}{_digits(row.value):>9}"
    return line if times is None else f"{line}{_digits(times):>12} x {row.beside}"


def verdicts(rows: Sequence[Row], bars: Iterable[Bar]) -> list[str]:
    """Return a line for each bar, which begins with PASS, FAIL, or NOT RUN."""
    values = {(row.measure, row.name): row.value for row in rows}
    return [_verdict(bar, values) for bar in bars]


def _verdict(bar: Bar, values: Mapping[tuple[Measure, str], float]) -> str:
    least = bar.measure in MORE_IS_BETTER
    unit = f" x {bar.beside}" if bar.beside else ""
    wanted = f"{bar.name}: {bar.measure}: {'at least' if least else 'at most'} {bar.limit:g}{unit}"
    value, one = values.get((bar.measure, bar.name)), values.get((bar.measure, bar.beside)) if bar.beside else 1.0
    if value is None or one is None:
        return f"NOT RUN  {wanted}"
    value /= one
    passed = value >= bar.limit if least else value <= bar.limit
    return f"{'PASS' if passed else 'FAIL'}  {wanted}; it is {_digits(value)}"


def _digits(value: float) -> str:
    """Return a figure with three significant digits, or with all before the point."""
    before = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{max(0, 3 - before)}f}"
