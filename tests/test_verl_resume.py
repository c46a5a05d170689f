"""agent_rl.backends.verl.driver.resume: the record of a killed run, rewound to its last checkpoint."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver import run as driver
from agent_rl.backends.verl.driver.resume import (
    MetricsLogger,
    last_checkpoint,
    open_metrics,
    owes_evaluation,
    record_position,
    rewind_to_checkpoint,
)
from agent_rl.backends.verl.driver.run import resume
from agent_rl.cli import main
from agent_rl.errors import CheckpointError, ConfigError, InfrastructureError, StoreError
from agent_rl.runs import writers
from agent_rl.runs.folder import METRICS
from agent_rl.runs.metrics import MetricsFile
from agent_rl.store.codec import dump_line
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.store.rotation import SHARD_BYTES
from agent_rl.store.token_records import TokenRecord, TokenRecordWriter, read_token_records
from tests.doubles import example_episode


def killed_run(folder: Path, *, checkpoint: int = 2, steps: int = 3, shard_bytes: int = SHARD_BYTES) -> Path:
    """A run that stored an episode and reported a row per step, noted a checkpoint, and was killed in mid-line."""
    metrics = MetricsLogger(MetricsFile(folder), lambda values: {})
    metrics.log({"success": 0.5}, 0)
    with EpisodeWriter(folder, shard_bytes=shard_bytes) as store, TokenRecordWriter(folder) as records:
        for step in range(1, steps + 1):
            store.write(example_episode(f"e{step}"))
            records.write([TokenRecord(f"e{step}", 0, step - 1, None, np.zeros(4, np.float32))])
            if step == checkpoint:
                record_position(folder / "checkpoints" / f"global_step_{step}", store)
                (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
            metrics.log({"loss": 1 / step}, step)
    metrics.finish()
    for file in ("episodes.jsonl", METRICS):
        with (folder / file).open("ab") as handle:
            handle.write(b'{"torn')
    return folder


def ids(path: Path) -> list[str]:
    return [e.id for e in read_episodes(path)]


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:.*torn line")
def test_rewind_sets_later_episodes_aside(tmp_path: Path) -> None:
    assert rewind_to_checkpoint(killed_run(tmp_path)) == 2
    assert ids(tmp_path) == ["e1", "e2"] and ids(tmp_path / "episodes.jsonl.undone-1") == ["e3"]
    assert steps_of(tmp_path) == [0, 1, 2]
    assert [r.episode for r in read_token_records(tmp_path)] == ["e1", "e2"]
    assert rewind_to_checkpoint(tmp_path) == 2  # there is nothing more to undo
    assert not (tmp_path / "episodes.jsonl.undone-2").exists() and steps_of(tmp_path) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*torn line")
def test_rewind_without_a_checkpoint_empties_the_record(tmp_path: Path) -> None:
    assert rewind_to_checkpoint(killed_run(tmp_path, checkpoint=9)) == 0
    assert ids(tmp_path) == [] and steps_of(tmp_path) == []
    assert ids(tmp_path / "episodes.jsonl.undone-1") == ["e1", "e2", "e3"]


@pytest.mark.filterwarnings("ignore:.*torn line")
@pytest.mark.parametrize("checkpoint", [1, 3, 5, 6, 9])
@pytest.mark.parametrize("episodes_a_shard", [1, 2, 3])
def test_rewind_opens_closed_shards_again(tmp_path: Path, checkpoint: int, episodes_a_shard: int) -> None:
    size = (len(dump_line(example_episode("e1"))) - 1) * episodes_a_shard
    run = killed_run(tmp_path, checkpoint=checkpoint, steps=6, shard_bytes=size)
    files = {file.name for file in run.iterdir()}
    assert "episodes-00001.jsonl.zst" in files
    kept = checkpoint if checkpoint < 7 else 0
    assert rewind_to_checkpoint(run) == kept
    assert ids(run) == [f"e{n}" for n in range(1, kept + 1)]
    undone = run / "episodes.jsonl.undone-1"
    assert (ids(undone) if kept < 6 else []) == [f"e{n}" for n in range(kept + 1, 7)]
    with EpisodeWriter(run, shard_bytes=size) as store:
        for step in range(kept + 1, 9):
            store.write(example_episode(f"e{step}"))
    assert ids(run) == [f"e{n}" for n in range(1, 9)]


@pytest.mark.filterwarnings("ignore:.*torn line")
def test_rewind_reads_positions_of_earlier_versions(tmp_path: Path) -> None:
    state = killed_run(tmp_path) / "checkpoints" / "global_step_2" / "agent_rl.json"
    name, offset = json.loads(state.read_text())["episodes"]
    assert name == "episodes-00001"
    state.write_text(json.dumps({"episodes_bytes": offset}))
    assert rewind_to_checkpoint(tmp_path) == 2 and ids(tmp_path) == ["e1", "e2"]


def test_rewind_refuses_a_checkpoint_of_another_trainer(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    assert last_checkpoint(tmp_path / "checkpoints") == 7
    with pytest.raises(CheckpointError, match=r"global_step_7/agent_rl.json' is missing"):
        rewind_to_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:.*torn line")
def test_rewind_refuses_a_running_run(tmp_path: Path) -> None:
    killed_run(tmp_path)
    with EpisodeWriter(tmp_path), pytest.raises(StoreError, match="another writer"):
        rewind_to_checkpoint(tmp_path)
    assert ids(tmp_path) == ["e1", "e2", "e3"] and len((tmp_path / METRICS).read_bytes().split(b"\n")) == 5


def test_resume_refuses_a_complete_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("env: calculator-v0\nstart_from: /models/m\nsteps: 2\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / METRICS).write_text('{"kind": "validation", "step": 2}\n')
    with pytest.raises(ConfigError, match="at step 2 already: give more with steps=N"):
        resume(tmp_path)
    with pytest.raises(ConfigError, match="at step 2 already"):
        resume(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match="is no run"):
        resume(tmp_path / "nowhere")


def test_resume_owes_the_evaluation_that_a_kill_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"env": "calculator-v0", "start_from": "/models/m", "steps": 5, "eval": {"every": 2}}
    config = VerlConfig.model_validate(settings)
    metrics = MetricsLogger(MetricsFile(tmp_path), lambda values: {})
    metrics.log({"loss": 1.0, "val-core/reward": 0.5}, 2)
    metrics.finish()
    assert [step for step in range(6) if owes_evaluation(tmp_path, config, step)] == [0, 4, 5]

    def stop(config: VerlConfig) -> list[str]:
        raise InfrastructureError("it goes on")

    monkeypatch.setattr(driver, "require_cluster", stop)
    (tmp_path / "config.yaml").write_text("env: calculator-v0\nstart_from: /models/m\nsteps: 5\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(InfrastructureError, match="it goes on"):
        resume(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["lr=1e-5", "seed=3"], "lr, seed can't change"),
        (["--dry-run"], "--dry-run can't change"),
        (["--explain"], "--explain can't change"),
    ],
)
def test_resume_names_fixed_settings(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "backend=verl", "resume=runs/x", "steps=9", *arguments]) == 1
    assert named in capsys.readouterr().err


def test_writers_get_settings_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    opened = {"tensorboard": lambda folder, settings: nullcontext(lambda *row: shown.extend((settings, row)))}
    monkeypatch.setattr(writers, "_OPEN", opened)
    (tmp_path / "config.yaml").write_text("verl: {KEY: '${oc.env:JUDGE_KEY}'}\n")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with open_metrics(tmp_path, ["tensorboard"]) as metrics:
        MetricsLogger(metrics, lambda values: {}).log({"actor/grad_norm": 0.5}, 2)
    assert shown == [{"verl": {"KEY": "${oc.env:JUDGE_KEY}"}}, ("train", 2, {"actor/grad_norm": 0.5})]
