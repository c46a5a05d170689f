"""README.md: its code and commands run as they are, and so do the commands that these print.

Runs are made small by further settings; what needs a service, an installation or another library is only parsed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tree import ROOT

import agent_rl as ar
from agent_rl.api import training_config
from agent_rl.cli import main
from agent_rl.config import load_config, parse_setting
from agent_rl.runs.rollout import RolloutSettings
from agent_rl.store.episodes import EpisodeWriter
from tests.runs import SMALL

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = [line.partition("  #")[0] for line in re.findall(r"^\$ (.*)", README, re.MULTILINE)]
INLINE = [
    " ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
]
COMMANDS = sorted({word for word in [*SHELL, *INLINE] if re.match(r"(agent-rl|make|pip install)( |$)", word)})

SHOP = "readme-shop-v0"
"""Its id here, as another test loads the examples' shop in the same process."""
TINY = SMALL | {"warm_start": {"demonstrations": 64, "copy_steps": 1, "clone_steps": 2, "batch": 8}, "steps": 1}
TINY |= {"rollout": {"groups": 2, "samples": 2, "slots": 4, "max_tokens": 8}, "eval": {"n": 2, "dev_n": 2, "every": 1}}
MIXTURE = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "experts": 4,
    "expert_intermediate": 16,
}

NOT_RUN = {
    "agent-rl": "names the program",
    "agent-rl view": "names the command",
    "agent-rl compare": "tests/test_comparison.py runs it",
    "agent-rl doctor": "needs Ray",
    "agent-rl init": "tests/test_project.py runs it and all that follows",
    "agent-rl sandbox": "tests/test_cli.py and tests/e2e/test_docker.py run both",
    "pip install": "installs",
}
"""What is not run, with the reason; settings of runs on verl and vLLM are checked."""


def flat(settings: dict[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif key != "env":
            yield f"{prefix}{key}={json.dumps(value)}"


def smaller(words: list[str]) -> list[str]:
    """Return a command's words, and settings that make it small."""
    if words[0] == "rollout":
        return [*words, "n=2", "max_tokens=8"]
    if words[0] == "train" and not {"--dry-run", "--explain", "--config"} & {*words}:
        resumed = any(word.startswith("resume=") for word in words)
        tiny = TINY | {"model": MIXTURE} if "model=tiny_moe" in words else TINY
        return [*words, "steps=2"] if resumed else [*words, *flat(tiny)]
    return words


class Shell:
    """Runs commands of agent-rl in a folder, with small settings."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, command: str) -> str:
        program, *words = shlex.split(re.sub(r"\bshop-v0", SHOP, command))
        assert program == "agent-rl"
        status = main(smaller(words))
        out, err = self.capsys.readouterr()
        assert status == 0, f"{command}: {err}"
        return out


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(PYTHON[0].replace('"shop-v0"', f'"{SHOP}"'), encoding="utf-8")
    return Shell(capsys)


def printed(output: str) -> list[str]:
    """Return the commands that an output holds."""
    return re.findall(r"(?:^ *|[;:] )(agent-rl [a-z]+ .*?)$", output, re.MULTILINE)


def kind(command: str) -> str:
    return next((known for known in NOT_RUN if command == known or command.startswith(f"{known} ")), "")


def test_readme_commands_are_known() -> None:
    """Every command is run below, parsed, or named in `NOT_RUN`."""
    run = {*SHELL, *FOLLOWED, *PARSED}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in COMMANDS:
        program, *words = command.split()
        assert words[0] in targets if program == "make" else command in run or kind(command), command


PARSED = (
    "agent-rl train backend=verl start_from=MODEL",
    "agent-rl train backend=verl start_from=MODEL env=search-v0 hardware=gpu_8x80gb",
    "agent-rl rollout policy=vllm policy.model=DIR",
)


@pytest.mark.parametrize("command", PARSED)
def test_readme_settings_of_servers_are_valid(command: str) -> None:
    _, name, *words = command.split()
    settings = dict(map(parse_setting, words))
    if name == "train":
        assert training_config(**settings).start_from == "MODEL"  # type: ignore[arg-type]
    else:
        assert load_config("rollout", RolloutSettings, settings=settings).policy.name == "vllm"


def test_readme_shop_is_played_checked_and_trained(shell: Shell) -> None:
    outputs = [shell(command) for command in SHELL if command.startswith("agent-rl")]
    assert len(outputs) == 5 and "success 100.0%" in outputs[0] and "held out" in outputs[-1]
    assert "no finding" in outputs[1]
    following = [command for output in outputs for command in printed(output)]
    kinds = [command.split()[1] for command in following]
    assert kinds.count("view") == 4 and kinds.count("train") == 2 and kinds.count("rollout") == 1
    for command in following:
        if command != "agent-rl train env=search-v0":  # the next test runs it
            shell(command)


FOLLOWED = (
    "agent-rl envs",
    "agent-rl check search-v0",
    "agent-rl train env=search-v0",
    "agent-rl algorithms",
    "agent-rl train model=tiny_moe rollout.weights=int4 algorithm.proximal=recompute algorithm.routing.replay=R3",
    "agent-rl train algorithm=gspo",
    "agent-rl train algorithm=gspo --explain",
    "agent-rl train resume=runs/latest",
    "agent-rl view runs/latest",
    "agent-rl view runs/latest --where 'reward<0.5'",
    "agent-rl view runs/latest eval-00002-sampled-0000 --tokens",
    "agent-rl rollout env=calculator-v0 policy=runs/latest/checkpoint temperature=0",
    "agent-rl train algorithm=dpo episodes=runs/latest start_from=runs/latest/checkpoint",
    "agent-rl rollout env=python-v0 policy=oracle",
)
"""In an order in which each finds what it reads."""


def test_readme_commands_run(shell: Shell, tmp_path: Path) -> None:
    assert {command for command in COMMANDS if command in FOLLOWED} >= {c for c in FOLLOWED if c in README}
    for command in FOLLOWED:
        if "episodes=runs/latest" in command:
            learnable(tmp_path / "runs" / "latest")
        shell(command)


def learnable(run: Path) -> None:
    """Put demonstrations, of which some succeed, in place of a run's episodes: its model's own hardly differ."""
    from transformers import AutoTokenizer

    policy = ar.demonstrator(ar.load_renderer(AutoTokenizer.from_pretrained(run / "checkpoint")))
    (run / "episodes.jsonl").unlink()
    with EpisodeWriter(run / "episodes.jsonl") as writer:
        for episode in ar.run("calculator-v0", policy, n=8, samples=8):
            writer.write(episode)


def test_readme_python_runs(shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluate = ar.train, ar.evaluate
    tiny = {**TINY, "algorithm": "gspo"}
    monkeypatch.setattr(ar, "train", lambda env, **settings: train(**{**settings, **tiny, "env": env}))
    monkeypatch.setattr(ar, "evaluate", lambda env, policy: evaluate(env, policy, n=2))
    scope: dict[str, object] = {"__name__": "readme", "ar": ar}
    for block in PYTHON[2:]:
        exec(compile(block, "README.md", "exec"), scope)
    assert "of 2" in capsys.readouterr().out
    assert OmegaConf.load("runs/latest/config.yaml").env == "calculator-v0"
