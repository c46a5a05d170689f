"""The sandboxes' benchmark on made-up figures: its table, its verdicts, and its meters."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tree import ROOT

from benchmarks.sandbox_table import Bar, Measure, Row, advantage, merged, table, verdicts

OURS, PEER = Row(Measure.CALL, "ours", 0.25), Row(Measure.CALL, "peer", 100.0, beside="ours")


@pytest.mark.parametrize(
    ("measure", "ours", "peer", "times"), [(Measure.CALL, 0.25, 100.0, 400.0), (Measure.RATE, 4000.0, 16.0, 250.0)]
)
def test_advantage_is_above_one_for_the_better(measure: Measure, ours: float, peer: float, times: float) -> None:
    rows = [Row(measure, "ours", ours), Row(measure, "peer", peer, beside="ours")]
    assert advantage(rows[1], rows) == times
    assert advantage(rows[0], rows) is None


def test_advantage_needs_a_measured_counterpart() -> None:
    assert advantage(PEER, [PEER, Row(Measure.COMMAND, "ours", 1.0)]) is None
    assert "x" not in table([PEER]).splitlines()[-1]


@pytest.mark.parametrize(("ours", "peer"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_advantage_omits_noise(ours: float, peer: float) -> None:
    rows = [Row(Measure.IDLE, "ours", ours), Row(Measure.IDLE, "peer", peer, beside="ours")]
    assert advantage(rows[1], rows) is None


def test_table_lists_ours_before_peers_with_ratios() -> None:
    rows = [PEER, Row(Measure.RATE, "ours", 12345.6), OURS, Row(Measure.CALL, "ours, too", 1.0)]
    lines = [line.split("  ") for line in table(rows).splitlines()]
    assert [[part.strip() for part in line if part.strip()] for line in lines] == [
        [Measure.CALL, "peer / ours"],
        ["ours", "0.250"],
        ["ours, too", "1.00"],
        ["peer", "100", "400 x ours"],
        [],
        [Measure.RATE, "ours / peer"],
        ["ours", "12346"],
    ]


def test_merged_keeps_best_figures_and_median_memory() -> None:
    times = [Row(Measure.CALL, name, value) for name, value in (("a", 2.0), ("b", 1.0), ("a", 1.5), ("a", 3.0))]
    rates = [Row(Measure.RATE, "a", value) for value in (10.0, 30.0, 20.0)]
    memories = [Row(Measure.USED, "a", value) for value in (4.0, -3.0, 5.0)]
    assert merged(times + rates + memories) == [times[2], times[1], rates[1], memories[0]]


@pytest.mark.parametrize(
    ("measure", "limit", "value", "verdict"),
    [
        (Measure.CALL, 0.15, 0.15, "PASS"),
        (Measure.CALL, 0.15, 0.151, "FAIL"),
        (Measure.RATE, 4000.0, 4000.0, "PASS"),
        (Measure.RATE, 4000.0, 3999.0, "FAIL"),
    ],
)
def test_verdicts_pass_or_fail_a_bar(measure: Measure, limit: float, value: float, verdict: str) -> None:
    (line,) = verdicts([Row(measure, "ours", value), Row(measure, "peer", 0.0)], [Bar(measure, "ours", limit)])
    assert line.startswith(verdict)


def test_verdicts_mark_unmeasured_bars() -> None:
    assert verdicts([OURS], [Bar(Measure.RATE, "ours", 1.0)])[0].startswith("NOT RUN")


@pytest.mark.parametrize(("times", "verdict"), [(1.2, "PASS"), (1.1, "FAIL")])
def test_verdicts_compare_with_a_peer(times: float, verdict: str) -> None:
    rows = [Row(Measure.OPEN, "ours", 12.0), Row(Measure.OPEN, "peer", 10.0)]
    bar = Bar(Measure.OPEN, "ours", times, "peer")
    assert verdicts(rows, [bar])[0].startswith(verdict) and "x peer; it is 1.20" in verdicts(rows, [bar])[0]
    assert verdicts(rows[:1], [bar])[0].startswith("NOT RUN")


# --- how it measures ---


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, as the benchmark finds it beside itself, with its patience shortened."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sandbox_measures

    monkeypatch.setattr(sandbox_measures, "SECONDS", 0.05)
    yield sandbox_measures
    for name in ("sandbox_measures", "sandbox_table"):
        del sys.modules[name]


class Boxes:
    """Counts its open sandboxes, with a delay for each step."""

    def __init__(
        self, answer: str = "42", *, opening: float = 0.0, calling: float = 0.001, closing: float = 0.0
    ) -> None:
        self.opened = self.now = self.most = 0
        self.answer, self.opening, self.calling, self.closing = answer, opening, calling, closing

    async def open(self) -> int:
        await asyncio.sleep(self.opening)
        self.opened, self.now = self.opened + 1, self.now + 1
        self.most = max(self.most, self.now)
        return self.opened

    async def close(self, box: int) -> None:
        await asyncio.sleep(self.closing)
        self.now -= 1

    async def python(self, box: int) -> str:
        await asyncio.sleep(self.calling)
        return self.answer


def measured(measures: ModuleType, boxes: Boxes, what: Measure) -> float:
    contestant = measures.Contestant(boxes.open, boxes.close, boxes.python, command=boxes.python)
    return float(asyncio.run(measures.METERS[what](contestant)))


def test_meters_measure_everything_and_close(measures: ModuleType) -> None:
    assert list(measures.METERS) == list(Measure)
    for what in Measure:
        boxes = Boxes()
        measured(measures, boxes, what)
        assert boxes.opened > 0 and boxes.now == 0, what


def test_meters_report_milliseconds_without_closing(measures: ModuleType) -> None:
    boxes = Boxes(opening=0.02, closing=0.1)
    assert 20 <= measured(measures, boxes, Measure.OPEN) < 100
    assert boxes.opened == measures.AT_LEAST
    assert 1 <= measured(measures, Boxes(), Measure.CALL) < 20


def test_rate_meter_runs_calls_concurrently(measures: ModuleType) -> None:
    boxes = Boxes(calling=0.01)
    assert 100 < measured(measures, boxes, Measure.RATE) < 100 * measures.AT_ONCE
    assert boxes.most == measures.AT_ONCE


def test_meters_refuse_wrong_answers_and_close(measures: ModuleType) -> None:
    boxes = Boxes(answer="41")
    with pytest.raises(RuntimeError, match="came out as '41'"):
        measured(measures, boxes, Measure.CALL)
    assert boxes.now == 0


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_megabytes_includes_child_processes(measures: ModuleType) -> None:
    async def grown() -> float:
        code = "held = bytearray(32 << 20); print(flush=True); input()"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", code, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        await process.stdout.readline()
        during = float(measures.megabytes())
        await process.communicate(b"\n")
        return during - float(measures.megabytes())

    assert 32 <= asyncio.run(grown()) < 64


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_megabytes_includes_named_containers(measures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 10 holds a container, and is not below this one; process 11 is in the container."""
    tree = {1: (0, "init"), os.getpid(): (1, "python"), 10: (1, "containerd-shim"), 11: (10, "python")}
    monkeypatch.setattr(measures, "_processes", lambda: tree)
    monkeypatch.setattr(measures, "_share", {1: 1024, os.getpid(): 2048, 10: 16384, 11: 32768}.__getitem__)
    assert measures.containers() == {10}
    assert (measures.megabytes(), measures.megabytes({10})) == (2, 50)
    tree[11] = (10, "dockerd")
    assert measures.megabytes({10}) == 18


def test_round_trip_takes_under_10_milliseconds(measures: ModuleType) -> None:
    assert 0 < measures.round_trip() < 10
