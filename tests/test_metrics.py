"""metrics.jsonl: every row once, also after a kill."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agent_rl.runs import metrics, writers
from agent_rl.runs.metrics import MetricsFile, read_metrics, rewind_metrics
from agent_rl.runs.writers import Writers
from tests.runs import untimed


def test_metrics_file_repairs_a_torn_tail(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as log:
        log.write("train", 1, {"loss": 0.5, "broken": float("nan")})
        log.write("eval", 1, {"split": "dev", "sampling": "greedy", "success": 0.5})
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"kind": "train", "st')
    assert len(read_metrics(file)) == 2
    with pytest.warns(UserWarning, match="torn"):
        log = MetricsFile(tmp_path)
    with log:
        log.write("train", 1, {"loss": 9.0})  # a resumed run repeats the step
        log.write("train", 2, {"loss": 0.25})
        log.write("eval", 1, {"split": "dev", "sampling": "sampled", "success": 0.25})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["kind"], r["step"], r.get("loss"), r.get("sampling")) for r in rows] == [
        ("train", 1, 0.5, None),
        ("eval", 1, None, "greedy"),
        ("train", 2, 0.25, None),
        ("eval", 1, None, "sampled"),
    ]
    assert rows[0]["broken"] is None
    assert (tmp_path / "metrics.jsonl.torn-1").read_bytes() == b'{"kind": "train", "st'


def test_read_metrics_reads_old_verl_files(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    old = [(0, {"val-core/x/test/reward/mean@1": 0.5}), (1, {"actor/loss": 1.0, "val-aux/y": 2.0}), (2, {"a": None})]
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in old))
    rows = [
        {"kind": "validation", "step": 0, "val-core/x/test/reward/mean@1": 0.5},
        {"kind": "train", "step": 1, "actor/loss": 1.0},
        {"kind": "validation", "step": 1, "val-aux/y": 2.0},
        {"kind": "train", "step": 2, "a": None},
    ]
    assert read_metrics(file) == rows
    rewind_metrics(file, 1)  # a resumed run writes them again
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows[:3]
    rewind_metrics(file, 0)
    assert file.read_text() == ""


def test_metrics_file_writes_numpy_numbers(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as log:
        log.write("train", 1, {"a": np.int64(3), "b": np.float64("nan"), "c": float("inf"), "d": np.float32(0.5)})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert untimed(row) == {"kind": "train", "step": 1, "a": 3, "b": None, "c": None, "d": 0.5}


def test_read_metrics_of_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_wall_time_of_a_resumed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for began, step in ((100.0, 1), (5000.0, 2)):
        monkeypatch.setattr(metrics.time, "monotonic", lambda began=began: began)
        log = MetricsFile(tmp_path)
        monkeypatch.setattr(metrics.time, "monotonic", lambda began=began: began + 30)
        log.write("train", step, {"loss": 0.5})
        assert log.wall_s == 30 * step
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["wall_s"] for row in rows] == [30, 60] and rows.wall_s == 60


def test_writers_get_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int, object]] = []
    monkeypatch.setattr(writers, "_OPEN", {"wandb": lambda *_: nullcontext(lambda *row: sent.append(row))})
    for steps in (range(1, 4), range(2, 5)):  # killed after step 3, and resumed from the checkpoint of step 1
        with MetricsFile(tmp_path, Writers(["wandb"], tmp_path, {}, print)) as log:
            log.rewind(1)
            log.write("cloning", 0, {"loss": 3.0})
            for step in steps:
                log.write("train", step, {"tokens": np.int64(step), "loss": np.float32(0.5)})
                log.write("eval", step, {"split": "dev", "sampling": "greedy", "success": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "train"] == [1, 2, 3, 4]
    assert [row for row in sent if row[0] == "train"] == [
        ("train", step, {"tokens": step, "loss": 0.5}) for step in range(1, 5)
    ]
    assert [row[:2] for row in sent if row[0] != "train"] == [
        ("cloning", 0), *(("eval/dev/greedy", step) for step in range(1, 5)),
    ]  # fmt: skip


def test_writer_that_failed_is_sent_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, list[int]] = {"tensorboard": [], "wandb": []}
    is_down = True

    def take(name: str, group: str, step: int, values: object) -> None:
        if is_down and name == "wandb" and step == 2:
            raise ConnectionError
        sent[name].append(step)

    opened = {name: lambda *_, name=name: nullcontext(partial(take, name)) for name in sent}
    monkeypatch.setattr(writers, "_OPEN", opened)
    for first in (1, 2):  # resumed from the checkpoint of step 1
        with MetricsFile(tmp_path, Writers(["tensorboard", "wandb"], tmp_path, {}, print)) as log:
            log.rewind(first - 1)
            for step in range(first, 5):
                log.write("train", step, {"train/loss": 1.0})
        is_down = False
    assert sent == {"tensorboard": [1, 2, 3, 4], "wandb": [1, 2, 3, 4]}
