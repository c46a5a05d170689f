"""README.md: its code and commands run as they are, and so do the commands that these print.

Runs are made small by further settings; what needs a server or another library is run in the file of `ELSEWHERE`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.cli.completion import subcommands
from agent_rl.cli.parser import make_parser
from agent_rl.gym.registry import BUILTIN
from agent_rl.store.episodes import EpisodeWriter
from tests.pages import blocks, commands, page, shell_lines
from tests.runs import SMALL

README = page("README.md")
PYTHON = blocks(README, "python")
SHELL = [line for line in shell_lines(README) if line.startswith("agent-rl ")]

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

ELSEWHERE = {
    "agent-rl init my-env": "Makefile",  # tests/test_project.py runs all that is printed from there on
    "agent-rl sandbox doctor": "tests/e2e/test_docker.py",
    "agent-rl sandbox build-image": "tests/e2e/test_docker.py",
    "agent-rl compare A B": "tests/test_statistics.py",
    "agent-rl stats runs/latest": "tests/test_statistics.py",
    "agent-rl diff runs/latest ID OTHER": "tests/test_episode_diff.py",
    "agent-rl view runs/latest --tui": "tests/test_tui.py",
    "agent-rl view runs/latest --serve": "tests/test_served_page.py",
    "agent-rl play search-v0": "tests/test_play.py",
    "agent-rl chat runs/latest env=calculator-v0": "tests/test_chat.py",
    "agent-rl replay verify runs/latest": "tests/test_verify_command.py",
    "agent-rl replay fork runs/latest ID --at-turn K policy=POLICY n=8": "tests/test_fork.py",
    "agent-rl judge run runs/latest rubric.yaml": "tests/test_judge_command.py",
    "agent-rl judge apply": "tests/test_judge_command.py",
    "agent-rl serve guess-v0": "tests/adapters/test_remote.py",
    "agent-rl train backend=verl start_from=MODEL": "tests/e2e/test_verl.py",
    "agent-rl doctor backend=verl": "tests/e2e/test_verl.py",
    "agent-rl rollout policy=vllm policy.model=DIR": "tests/e2e/test_vllm_policy.py",
    "agent-rl rollout policy=openai policy.model=MODEL": "tests/test_openai_rollout.py",
    "agent-rl rollout policy=openai policy.model=MODEL env=search-v0 n=100 samples=4 by=relation": (
        "tests/test_openai_rollout.py"
    ),
    "agent-rl train backend=verl start_from=MODEL env=search-v0 hardware=gpu_8x80gb": "tests/on_verl/test_docs.py",
    "agent-rl export runs/latest --to sft -o sft.jsonl": "tests/test_formats.py",
    "agent-rl import FILE -o episodes.jsonl": "tests/test_formats.py",
    "make setup": "tests/test_project.py",
    "make train": "tests/test_project.py",
    "make train-real": "tests/test_real_model.py",
    "make test": ".ci/run",
    "make test-verl": ".ci/run",
}
"""Where commands that need a server, another library or a checkout are run, as they are written there, too."""


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
        program, *words = shlex.split(re.sub(r"(?<![\w-])shop-v0", SHOP, command))
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


def test_readme_commands_are_run() -> None:
    """Each is run below, or in another file; `pip install` installs, `agent-rl` and `agent-rl view` are names."""
    run = {*SHELL, *FOLLOWED, *ELSEWHERE, "agent-rl", "agent-rl view"}
    assert [line for line in commands(README) if line not in run and not line.startswith("pip install")] == []
    assert [line for line, file in ELSEWHERE.items() if line not in page(file)] == []
    assert {*ELSEWHERE} <= {*commands(README)}


def test_readme_has_every_command_and_environment() -> None:
    text = " ".join(commands(README))
    assert [name for name in subcommands(make_parser()) if f"agent-rl {name}" not in text] == []
    assert re.findall(r"^\| `([\w-]+-v\d+)` \|", README, re.MULTILINE) == sorted(BUILTIN)


def test_readme_shop_is_played_checked_and_trained(shell: Shell) -> None:
    outputs = [shell(command) for command in SHELL]
    assert len(outputs) == 4 and "success 100.0%" in outputs[0] and "held out" in outputs[-1]
    assert "no finding" in outputs[1]
    following = [command for output in outputs for command in printed(output)]
    kinds = [command.split()[1] for command in following]
    assert kinds.count("view") == 3 and kinds.count("train") == 2 and kinds.count("rollout") == 1
    for command in following:
        if command != "agent-rl train env=search-v0":  # the next test runs it
            shell(command)


FOLLOWED = (
    "agent-rl envs",
    "agent-rl check calculator-v0",
    "agent-rl train env=search-v0",
    "agent-rl algorithms",
    "agent-rl train model=tiny_moe rollout.weights=int4 algorithm.proximal=recompute algorithm.routing.replay=R3",
    "agent-rl train algorithm=gspo",
    "agent-rl train algorithm=gspo --explain",
    "agent-rl train resume=runs/latest",
    "agent-rl runs",
    "agent-rl view runs/latest",
    "agent-rl view runs/latest --where 'reward<0.5'",
    "agent-rl episodes runs/latest --where 'reward < 0.5 and not stop = turns'",
    "agent-rl view runs/latest eval-00002-sampled-0000 --tokens",
    "agent-rl rollout env=calculator-v0 policy=runs/latest/checkpoint temperature=0",
    "agent-rl compare runs/one runs/other",
    "agent-rl train algorithm=dpo episodes=runs/latest start_from=runs/latest/checkpoint",
    "agent-rl rollout env=python-v0 policy=oracle",
    "agent-rl train --config",
    "agent-rl completion bash",
)
"""In an order in which each finds what it reads."""


@pytest.mark.sandbox
def test_readme_commands_run(shell: Shell, tmp_path: Path) -> None:
    followed, trainings = {*FOLLOWED}, set[str]()
    for command in FOLLOWED:
        if "episodes=runs/latest" in command:
            learnable(tmp_path / "runs" / "latest")
        for name in ("one", "other") if "other" in command else ():
            (tmp_path / "runs" / name).symlink_to((tmp_path / "runs" / "latest").resolve())
        for line in printed(shell(command)):
            shape = re.sub(r"\S*runs/\S+|eval-\d+", "RUN", line)  # each once: those of every training are alike
            if line.startswith("agent-rl train"):
                trainings |= {line} - followed
            elif shape not in followed:
                followed.add(shape)
                shell(line)
    assert trainings == {"agent-rl train env=calculator-v0", "agent-rl train env=python-v0"}
    shell("agent-rl train env=calculator-v0")
    shell(
        "agent-rl train env=python-v0 --dry-run"
    )  # the next test trains: its sandboxes take longer than a suite should


@pytest.mark.sandbox
def test_readme_trains_in_sandboxes(shell: Shell) -> None:
    assert "Done: " in shell("agent-rl train env=python-v0")


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
