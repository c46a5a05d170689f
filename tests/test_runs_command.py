"""`agent-rl runs`: the runs of a folder at a glance."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from agent_rl.cli import main
from agent_rl.runs.listing import list_runs
from agent_rl.store import index
from agent_rl.store.codec import dump_line
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.selection import select
from tests.doubles import example_episode


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folders = [tmp_path / name for name in ("trained", "rolled-out", "under-way", "no-run")]
    for folder in folders:
        folder.mkdir()
    trained, rolled_out, under_way, _ = folders
    rows: list[dict[str, object]] = [
        {"kind": "eval", "step": 0, "sampling": "sampled", "split": "eval", "successes": 2, "n": 8},
        {"kind": "train", "step": 1, "rollout/success": 0.3},
        {"kind": "train", "step": 2, "rollout/success": 0.4},
        {"kind": "eval", "step": 2, "sampling": "sampled", "split": "eval", "successes": 6, "n": 8},
    ]
    for folder, count in ((trained, 4), (under_way, 2)):
        lines = [json.dumps(row) + "\n" for row in rows[:count]]
        (folder / "metrics.jsonl").write_text("".join([*lines, '{"kind": "train", "st']))
        (folder / "config.yaml").write_text("env: shop-v0\nsteps: 2\nalgorithm:\n  name: grpo\n")
        (folder / "episodes.jsonl").write_bytes(b"".join(dump_line(example_episode(str(n))) for n in range(3)))
    (trained / "summary.json").write_text("{}")
    (under_way / "verl.yaml").write_text("")
    (under_way / "episodes.status.json").write_text(json.dumps({"time": time.time()}))
    (rolled_out / "episodes.jsonl").write_bytes(dump_line(example_episode("a")))
    (rolled_out / "episodes.yaml").write_text("env: [unbalanced")
    (rolled_out / "judged").mkdir()
    (rolled_out / "judged" / "x.jsonl").touch()
    (tmp_path / "latest").symlink_to("trained")
    for age, folder in enumerate(folders):
        for file in folder.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    return tmp_path


def test_runs_knows_one_without_a_status_by_its_writer(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> str:
        assert main(["runs", str(runs), "--json"]) == 0
        found = map(json.loads, capsys.readouterr().out.splitlines())
        return next(str(row["state"]) for row in found if Path(row["folder"]).name == "under-way")

    (runs / "under-way" / "episodes.status.json").unlink()
    with EpisodeWriter(runs / "under-way"):
        assert state() == "running"
    assert state() == "stopped"


@pytest.mark.parametrize(
    ("summary", "state"),
    [('{"steps": 2}', "finished"), ('{"steps": 1}', "stopped"), ("{damaged", "finished"), ("[]", "finished")],
)
def test_runs_says_whether_all_steps_were_taken(runs: Path, summary: str, state: str) -> None:
    (runs / "trained" / "summary.json").write_text(summary)
    assert {Path(run.folder).name: run.state for run in list_runs(runs)}["trained"] == state


def test_runs_lists_damaged_metrics_and_counts_checkpoints(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "trained"
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'\n[1, "train"]\n{"kind": "train"}\n{"kind": "train", "step": null}\n\0"train"\n')
    size = sum(file.stat().st_size for file in run.iterdir())
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "model").write_bytes(bytes(1000))
    assert main(["runs", str(runs), "--json"]) == 0
    found = {Path(row["folder"]).name: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (found["trained"]["step"], found["trained"]["success"], found["trained"]["bytes"]) == (2, 0.75, size + 1000)


def test_runs_says_how_far_each_is(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "SMALL", 0)
    select(runs / "trained", limit=0)  # makes an index
    assert main(["runs", str(runs), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shown = ("state", "env", "what", "step", "steps", "before", "success", "episodes", "judged")
    assert {Path(run["folder"]).name: tuple(run[name] for name in shown) for run in found} == {
        "trained": ("finished", "shop-v0", "grpo", 2, 2, 0.25, 0.75, 3, 0),
        "under-way": ("running", "shop-v0", "grpo, verl", 1, 2, 0.25, 0.3, 3, 0),
        "rolled-out": ("stopped", "", "", None, None, None, None, 1, 1),
    }
    assert [Path(run["folder"]).name for run in found][1:] == ["rolled-out", "under-way"]  # the index is new
    assert main(["runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "25% to 75%" in out and out.endswith(f"3 runs in {runs}\n")
    assert main(["runs", str(runs / "none")]) == 1 and "there is no folder of runs" in capsys.readouterr().err
