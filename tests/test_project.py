"""From `git clone` to an environment of one's own that trains: each command is printed by the one before."""

from __future__ import annotations

import os
import re
import shlex
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
from agent_rl.cli.config_text import write_config
from agent_rl.cli.settings import read_settings
from agent_rl.config import load_config
from tests.pages import page, shell_lines
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


def printed(output: str, command: str) -> str:
    """A command that was printed, as it stands there."""
    found = re.search(rf"(?:^  |[;:] )((?:\. \S+ && )?agent-rl {command}( .*?)?)(  |$)", output, re.MULTILINE)
    assert found is not None, output
    return found[1]


class Clone:
    """A checkout with everything installed: its shell runs this interpreter as `agent-rl`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.activated = folder, False
        shutil.copy(ROOT / "Makefile", folder)
        for name in ("pyproject.toml", "constraints.txt", ".venv/pyvenv.cfg", ".venv/.train"):  # ever newer
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        bin = folder / ".venv" / "bin"
        bin.mkdir()
        (bin / "activate").write_text(f"PATH={bin}:$PATH\n")
        (bin / "agent-rl").write_text(f'#!/bin/sh\nexec {sys.executable} -m agent_rl "$@"\n')
        (bin / "agent-rl").chmod(0o755)

    def __call__(self, line: str) -> str:
        path = f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}" if self.activated else os.environ["PATH"]
        self.activated |= "/activate " in line
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{line}: {ran.stderr}"
        return ran.stdout


@pytest.mark.sandbox
def test_five_printed_commands_lead_from_clone_to_training(call: Call, tmp_path: Path) -> None:
    """Each is run as the one before prints it; the settings that `init` writes are made small."""
    shell, ran = Clone(tmp_path), ["git clone", "make setup"]
    assert "make setup" in shell_lines(page("README.md"))
    output = shell(ran[-1])
    for command in ("init", "rollout", "train"):
        ran.append(printed(output, command))
        output = shell(ran[-1])
        if command == "init":
            assert "no finding" in call(*words(printed(output, "check")))
            file = tmp_path / "my-env" / "train.yaml"
            file.write_text(yaml.safe_dump(SMALL | yaml.safe_load(file.read_text()) | {"steps": 4}))
        elif command == "rollout":
            assert "success 100.0%" in output and "what does the" in call(*words(printed(output, "view")))
    assert len(ran) <= 5 and "success" in output and (tmp_path / "runs" / "latest" / "report.html").exists()
    assert "reward" in call(*words(printed(output, "view")))
    assert "1 episode in runs/" in call(*words(printed(output, "rollout")), "n=1", "max_tokens=8")


def words(line: str) -> list[str]:
    return shlex.split(line)[1:]


@pytest.mark.sandbox
def test_make_train_passes_settings_on(tmp_path: Path) -> None:
    assert "env: search-v0\n" in Clone(tmp_path)('make train ARGS="env=search-v0 --dry-run"')


@pytest.mark.sandbox
def test_project_passes_its_own_tests(call: Call, tmp_path: Path) -> None:
    call("init", "my-env")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "my-env"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("json", "a module already"),
        ("My.Env", "can't be an environment's name"),
        ("search", "choose another name, such as my-search"),
        ("has", "has files"),
    ],
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
