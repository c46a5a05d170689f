"""docs/verl.md: its commands compose, its settings exist, and its messages are the ones that are raised."""

from __future__ import annotations

import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.cli import main
from agent_rl.config import _keys, choices, load_config
from agent_rl.runs.rollout import RolloutSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verl.md").read_text()
COMMANDS = [
    shlex.split(line[2:])
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.S)
    for line in block.split("\n")
    if line
]
QUOTED = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", PAGE, flags=re.S))


OF_THE_README = "agent-rl train backend=verl start_from=MODEL env=search-v0 hardware=gpu_8x80gb"


def test_readme_command_passes_its_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert OF_THE_README in (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").mkdir()
    assert main([*shlex.split(OF_THE_README)[1:], "--dry-run"]) == 0
    composed = OmegaConf.create(capsys.readouterr().out)
    assert composed.trainer.n_gpus_per_node == 8 and composed.actor_rollout_ref.model.path == str(tmp_path / "MODEL")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_docs_commands_compose(command: list[str], mixture: str) -> None:
    program, name, *rest = command
    assert program == "agent-rl" and name in ("train", "rollout", "view", "doctor")
    settings = [word.replace("Qwen/Qwen3-30B-A3B", mixture) for word in rest if "=" in word]  # no hub here
    if name == "rollout":
        load_config(None, RolloutSettings, settings)
    elif "backend=verl" in settings:
        settings.remove("backend=verl")
        compose_verl(load_config("backend/verl", VerlConfig, settings), Path("/runs/r"))
    elif name == "train":
        load_config("backend/embedded", TrainConfig, settings)


def test_docs_settings_exist() -> None:
    ours = {key for key, _ in chain(_keys(VerlConfig), _keys(RolloutSettings))}
    words = [word.partition("=") for quoted in QUOTED for word in quoted.split()]
    composed = compose_verl(load_config("backend/verl", VerlConfig, ["start_from=/m"]), Path("/runs/r"))
    theirs = [(key, value) for key, _, value in words if key.startswith("verl.") and key != "verl.KEY"]
    assert len(theirs) >= 5
    for key, value in theirs:
        if value:
            compose_verl(load_config("backend/verl", VerlConfig, ["start_from=/m", f"{key}={value}"]), Path("/runs/r"))
        else:
            assert OmegaConf.select(composed, key.removeprefix("verl."), default="missing") != "missing", key
    groups = (
        "algorithm",
        "hardware",
        "async.",
        "rollout.",
        "algorithm.",
        "updates.",
        "runs_dir",
        "start_from",
    )
    named = [(key, value) for key, _, value in words if key.startswith(groups) and "/" not in key]
    assert len(named) >= 12
    for key, value in named:
        assert key in ours, key
        assert not value or value in choices(key) or key not in ("algorithm", "hardware"), f"{key}={value}"
    assert {"icepop", "decoupled_ppo", "m2po"} <= set(choices("algorithm"))


def test_docs_messages_are_raised() -> None:
    sources = [*(ROOT / "agent_rl" / "backends").rglob("*.py"), *(ROOT / "agent_rl" / "engines").rglob("*.py")]
    sources += [*(ROOT / "agent_rl" / "policy").rglob("*.py")]
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in sources))
    table = PAGE.partition("## 7.")[2].partition("## 8.")[0]
    messages = re.findall(r"^\| `([^`]+)`", table, re.M)
    assert len(messages) >= 12
    assert [message for message in messages if message not in text] == []


def test_docs_name_every_hardware_preset() -> None:
    assert [name for name in choices("hardware") if f"`{name}`" not in PAGE] == []
    assert len(PAGE.splitlines()) <= 150
