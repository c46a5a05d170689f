"""Tasks and metrics by the real datasets, pyarrow and pandas, which verl brings: elsewhere, stand-ins are tested."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

import agent_rl as ar
from agent_rl.gym.task_files import read_rows
from agent_rl.gym.tasks import TaskSource
from agent_rl.runs.metrics import Metrics

ROWS = [{"question": f"{n} + 1?", "about": {"sum": n + 1, "of": [n, 1]}, "hint": None} for n in range(30)]


@pytest.fixture
def rows() -> Dataset:
    return Dataset.from_list(ROWS)


def by_number(source: TaskSource, split: str, n: int) -> list[ar.Task]:
    return [source.get(split, index) for index in range(n)]


def test_parquet_file_is_read(rows: Dataset, tmp_path: Path) -> None:
    parquet.write_table(rows.data.table, tmp_path / "tasks.parquet")
    assert read_rows("tasks.parquet", "train", tmp_path) == ROWS
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "tasks.parquet").read_bytes()[:-5])
    with pytest.raises(ar.ConfigError, match=r"torn\.parquet: not Parquet"):
        read_rows("torn.parquet", "train", tmp_path)


def test_data_set_is_taken_as_it_is_and_saved(rows: Dataset, tmp_path: Path) -> None:
    splits = DatasetDict({"train": rows, "eval": rows.select([7, 8])})
    rows.save_to_disk(tmp_path / "one")
    splits.save_to_disk(tmp_path / "two")
    assert read_rows(rows, "train", tmp_path) == read_rows("one", "train", tmp_path) == ROWS
    for tasks in (splits, "two"):
        source = TaskSource(tasks, base=tmp_path)
        assert source.splits == ("train", "eval") and by_number(source, "eval", 2) == ROWS[7:9]


def test_folder_without_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ar.ConfigError, match="folder"):
        read_rows(tmp_path, "train", tmp_path)


def test_metrics_become_a_data_frame() -> None:
    frame = Metrics([{"kind": "train", "step": 1, "train/loss": 0.5}, {"kind": "eval", "step": 1}]).to_pandas()
    assert frame.shape == (2, 3) and frame["train/loss"].tolist()[0] == 0.5
