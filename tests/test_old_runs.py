"""Resuming runs of earlier versions."""

from pathlib import Path

import pytest
import yaml

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import resume_run
from agent_rl.errors import CheckpointError
from agent_rl.gym.registry import spec
from agent_rl.runs.folder import read_config
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.runs import assert_same_run, config, killed_run


@pytest.mark.sandbox
def test_old_run_without_new_settings_resumes_exactly(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killed_run(config(tmp_path), monkeypatch)
    old = yaml.safe_load((killed / "config.yaml").read_text())
    del old["imports"], old["budget"], old["updates"]
    old["updates_per_batch"] = 1
    (killed / "config.yaml").write_text(yaml.safe_dump(old))
    resume_run(killed, Progress())
    assert_same_run(folder, killed)


def test_old_run_gets_no_second_tries(folder: Path, tmp_path: Path) -> None:
    old = yaml.safe_load((folder / "config.yaml").read_text())
    assert read_config(folder, TrainConfig).rollout.retry_temperature == old["rollout"].pop("retry_temperature") == 2.0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    assert read_config(tmp_path, TrainConfig).rollout.retry_temperature is None


@pytest.mark.sandbox
def test_old_run_evaluates_on_the_split_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = killed_run(config(tmp_path), monkeypatch)
    old = yaml.safe_load((killed / "config.yaml").read_text())
    old["eval"]["split"] = "test"
    (killed / "config.yaml").write_text(yaml.safe_dump(old))
    resume_run(killed, Progress())
    assert spec(old["env"]).tasks.get("test", 3) == spec(old["env"]).tasks.get("eval", 3)
    assert {e.origin.split for e in read_episodes(killed) if e.origin.purpose == "eval"} == {"eval", "test"}


def test_old_run_with_unknown_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("env: calculator-v0\nrollout: {grops: 3}\nlearning_rate: 1\n")
    found = r"is not one of this version, .*'grops' in rollout.*; no key 'learning_rate'"
    with pytest.raises(CheckpointError, match=found):
        resume_run(tmp_path, Progress())
