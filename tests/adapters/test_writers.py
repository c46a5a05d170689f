"""report_to: what reaches TensorBoard, Weights & Biases and trackio, beside these packages."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agent_rl.runs.metrics import MetricsFile, read_metrics
from agent_rl.runs.writers import WriterName, Writers, require_writers

NAMES: tuple[WriterName, ...] = ("tensorboard", "wandb", "trackio")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)


def train(folder: Path, steps: range, said: list[str], names: tuple[WriterName, ...]) -> None:
    with MetricsFile(folder, Writers(names, folder, {"steps": 4}, said.append)) as metrics:
        metrics.write("cloning", 0, {"loss": 3.0})
        for step in steps:
            metrics.write("train", step, {"train/loss": 1 / step, "train/entropy": math.nan, "rollout/success": 0.5})
        metrics.write("eval", steps[-1], {"split": "dev", "sampling": "greedy", "success": 0.25})


def curves_of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_writers_continue_their_curves(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", list[str]()
    folder.mkdir()
    train(folder, range(1, 3), said, NAMES)
    train(folder, range(1, 5), said, NAMES)  # a resumed run repeats steps
    assert said == []
    curves = curves_of_tensorboard(folder)
    assert dict(curves["train/loss"]) == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25})
    assert curves["cloning/loss"] == [(0, 3.0)] and curves["eval/dev/greedy/success"] == [(2, 0.25), (4, 0.25)]
    assert "train/entropy" not in curves and len(read_metrics(folder / "metrics.jsonl")) == 7

    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("agent_rl", "run")
    stored = {row["step"]: row["train/loss"] for row in logs if "train/loss" in row}
    assert stored == pytest.approx(dict(curves["train/loss"]))
    written = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    (id,) = {file.stem.removeprefix("run-") for file in written}
    assert len(written) == 2 and id == (folder / "wandb_id").read_text()  # one run, in two parts


def test_failing_writer_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def unreachable(*args: object, **settings: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(wandb, "init", unreachable)
    said: list[str] = []
    train(tmp_path, range(1, 4), said, ("wandb", "tensorboard"))
    (warning,) = said
    assert warning.startswith("warning: wandb gets no more metrics, ConnectionError: no network")
    assert (tmp_path / "warnings.txt").read_text().count("\n") == 1
    assert (
        len(curves_of_tensorboard(tmp_path)["train/loss"]) == 3 and len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    )


def test_writer_without_login_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # which had read the mode before
    said: list[str] = []
    train(tmp_path, range(1, 3), said, ("wandb",))
    (warning,) = said
    assert "UsageError" in warning and "wandb login" in warning


def test_require_writers_accepts_what_is_installed() -> None:
    require_writers(NAMES)
