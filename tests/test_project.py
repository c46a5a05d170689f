"""From `git clone` to an environment of one's own that trains: each command is printed by the one before."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tree import ROOT

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.cli import main
from agent_rl.cli.settings import read_settings
from agent_rl.config import load_config, write_config
from tests.runs import SMALL

Call = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in an empty folder; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, status: int = 0) -> str:
        assert main(argv) == status
        out, err = capsys.readouterr()
        return err if status else out

    return run


def printed(output: str, command: str) -> list[str]:
    """The words of a command that was printed."""
    found = re.search(rf"agent-rl ({command} .*?)(  |$)", output, re.MULTILINE)
    assert found is not None, output
    return found[1].split()


def after_setup(folder: Path) -> str:
    """The output of `make setup` in a folder with everything installed."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt", ".venv/pyvenv.cfg", ".venv/.train"):  # each newer than the last
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return subprocess.run(["make", "setup"], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_printed_commands_lead_from_setup_to_training(call: Call, tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    wrote = call(*printed(after_setup(tmp_path / "clone"), "init"))
    checked = call(*printed(wrote, "rollout"))
    assert "success 100.0%" in checked
    assert "no finding" in call(*printed(wrote, "check"))
    assert "what does the" in call(*printed(checked, "view"))
    small = [f"{key}={json.dumps(value).replace(chr(34), '')}" for key, value in SMALL.items() if key != "env"]
    trained = call(*printed(checked, "train"), *small)
    assert "success" in trained and "reward" in call(*printed(trained, "view"))
    checkpoint = printed(trained, "rollout")
    assert "episodes in runs/" in call(*checkpoint, "n=1", "max_tokens=8")


def test_project_passes_its_own_tests(call: Call, tmp_path: Path) -> None:
    call("init", "my-env")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "my-env"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "why"), [("json", "a module already"), ("My.Env", "can't be an environment's name"), ("has", "has files")]
)
def test_init_refuses_a_name_that_fails_later(call: Call, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "has").mkdir()
    (tmp_path / "has" / "file").touch()
    assert why in call("init", name, status=1)


def test_config_file_is_below_the_command_line(call: Call, tmp_path: Path) -> None:
    call("init", "below-env")
    options = ("train", "config=below-env/train.yaml", "steps=3", "--config")
    settings = yaml.safe_load(call(*options))
    assert (settings["env"], settings["steps"]) == ("below-env-v0", 3)
    assert settings["imports"] == [str(tmp_path / "below-env" / "below_env.py")]
    assert "can't be read" in call("train", "config=nowhere.yaml", status=1)
    Path("text.yaml").write_text("- steps")
    assert "has no settings" in call("train", "config=text.yaml", status=1)


@pytest.mark.parametrize("algorithm", ["gspo", "dpo", "a2c"])
def test_config_file_may_be_what_train_config_prints(tmp_path: Path, algorithm: str) -> None:
    config = load_config("backend/embedded", TrainConfig, [f"algorithm={algorithm}", "seed=5"])
    (tmp_path / "c.yaml").write_text(write_config(config))
    assert load_config("backend/embedded", TrainConfig, settings=read_settings(tmp_path / "c.yaml")) == config
