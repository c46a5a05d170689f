"""The command line, called as a shell would."""

import argparse
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.cli import main
from agent_rl.cli.completion import subcommands
from agent_rl.cli.parser import _parse, make_parser
from agent_rl.config import choices, load_config
from agent_rl.policy.by_name import POLICIES
from agent_rl.store.episodes import read_episodes

STORED = Path(__file__).parent / "data" / "episodes_of_schema_2.jsonl"


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_envs_lists_builtin_environments(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "envs")
    assert status == 0 and "calculator-v0" in out and "search-v0" in out


def test_envs_imports_a_users_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import agent_rl as ar\n"
        "@ar.register('mine-v0')\n"
        "class Mine(ar.Env):\n"
        "    '''My own.'''\n"
        "    def reset(self, task, rng): return 'hi'\n"
        "    def step(self, action): return ar.Step(terminated=True)\n"
    )
    status, out, _ = call(capsys, "envs", "--import", str(file))
    assert status == 0 and "mine-v0" in out and "My own." in out


def test_rollout_stores_episodes_for_view(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out" / "episodes.jsonl"
    status, out, _ = call(capsys, "rollout", "env=search", "n=3", "samples=2", f"out={file}")
    assert status == 0 and "100.0%" in out and "of 6" in out
    episodes = list(read_episodes(file))
    assert len(episodes) == 6 and len({e.group_id for e in episodes}) == 3
    status, out, _ = call(capsys, "view", str(file), episodes[4].id[:12])
    assert status == 0 and episodes[4].id[:12] in out and "capital" in out
    status, out, _ = call(capsys, "view", str(file), "--limit", "2")
    assert status == 0 and "1 to 2 of 6 episodes" in out


def test_rollout_says_why_episodes_failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import agent_rl as ar\n"
        "from agent_rl.envs.calculator import Calculator, make_task\n"
        "from agent_rl.errors import SandboxError\n"
        "@ar.register('fails-v0', tasks=make_task, splits=['eval'])\n"
        "class Fails(Calculator):\n"
        "    count = 0\n"
        "    def reset(self, task, rng):\n"
        "        Fails.count += 1\n"
        "        if Fails.count > 3: return super().reset(task, rng)\n"
        "        raise SandboxError('no key' if Fails.count == 1 else 'no engine;\\nsee the doctor')\n"
    )
    options = ("--import", f"{tmp_path}/fails.py", "env=fails-v0", "n=4", f"out={tmp_path}/e.jsonl")
    status, out, _ = call(capsys, "rollout", *options)
    why = "3 failed\nended: error (3), done (1)\n"
    why += "2 failed: sandbox_lost: SandboxError: no engine; see the doctor\n"
    why += "1 failed: sandbox_lost: SandboxError: no key\n"
    assert status == 0 and f"{why}Run them again: agent-rl rollout resume={tmp_path}/e.jsonl retry_failed=true\n" in out
    assert "0 failed\n1 episode in" in call(capsys, "rollout", "n=1", f"out={tmp_path}/other.jsonl")[1]


def test_rollout_stores_readable_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call(capsys, "rollout", "n=1", f"out={tmp_path}/e.jsonl")
    (row,) = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert row["messages"][0]["role"] == "user" and row["messages"][0]["content"].startswith("compute")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rollout", "env=calculater-v0"], "Did you mean 'calculator-v0'?"),
        (["rollout", "envs=calculator-v0"], "Did you mean 'env'?"),
        (["rollout", "policy=orcale"], "Did you mean 'oracle'?"),
        (["rollout", "split=evil"], "Did you mean 'eval'?"),
        (["rollout", "policy=tests"], "config.json"),
        (["train", "resume=nowhere"], "no run"),
        (["train", "resume=nowhere", "seed=3"], "seed can't change"),
        (["train", "env=nothing-v7"], "no environment 'nothing-v7'"),
        (["train", "algorithm.objective=gpso"], "Did you mean 'gspo'?"),
        (["train", "algorithm.weight=token-tis", "algorithm.proximal=rollout"], "set proximal=auto or recompute"),
        (["train", "eval.split=evil"], "Did you mean 'eval'?"),
        (["train", "algorithm=dpo", "episodes=nowhere"], "there is no episode file"),
        (["train", f"episodes={STORED}"], "objective=ppo-clip learns from rollouts"),
        (["view", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_main_reports_mistakes_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    status, _, err = call(capsys, *argv)
    assert status == 1 and message in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()  # nothing is begun before the settings are known to be right


def test_main_writes_what_an_encoding_has_not_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "über.jsonl").write_bytes(STORED.read_bytes())
    command = [sys.executable, "-m", "agent_rl", "view", "über.jsonl"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=ascii_only, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and r"\xfcber.jsonl" in done.stdout and not done.stderr


def test_main_needs_no_stdout() -> None:
    shell = f"'{sys.executable}' -m agent_rl view {STORED} >&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr


def test_children_find_streams_that_were_closed(tmp_path: Path) -> None:
    """The next files that are opened would be in their place, such as that of the episodes."""
    (file := tmp_path / "prints.py").write_text(
        "import subprocess\n"
        "import agent_rl as ar\n"
        "@ar.register('prints-v0', tasks=[{'n': 1}])\n"
        "class Prints(ar.Env):\n"
        "    def reset(self, task, rng): return 'hi'\n"
        "    def step(self, action): return ar.Step(terminated=True)\n"
        "    def oracle(self): yield 'x'\n"
        "    @ar.reward\n"
        "    def printed(self, episode): return not subprocess.call(['sh', '-c', 'cat; echo x; echo x >&2'])\n"
    )
    rollout = f"rollout --import {file} env=prints-v0 policy=oracle n=1 split=train out={tmp_path}/e.jsonl"
    shell = f"'{sys.executable}' -m agent_rl {rollout} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], check=False).returncode == 0
    (episode,) = read_episodes(tmp_path / "e.jsonl")
    assert episode.reward == 1, episode


def test_play_without_stdin_ends() -> None:
    shell = f"'{sys.executable}' -m agent_rl play calculator-v0 <&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Nothing was played" in done.stdout and not done.stderr


def test_algorithms_lists_formulas_and_train_explains_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, listed, _ = call(capsys, "algorithms")
    assert status == 0 and all(name in listed for name in choices("algorithm"))
    assert "= dr_grpo-paper, gpg, minirl, rloo at ratio 1" in listed and "rloo-paper" in listed
    assert "4 updates a batch" in listed
    status, explained, _ = call(capsys, "train", "algorithm=icepop", "algorithm.weight.low=0.4", "--explain")
    assert status == 0 and "icepop (low=0.4, high=5.0)" in explained and "old is recomputed" in explained


def helps(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    for command in subcommands(parser).values():
        yield command, command.format_help()
        yield from helps(command)


def test_help_has_examples_that_parse() -> None:
    for command, text in helps(make_parser()):
        found = re.findall(r"^  (agent-rl .*?)(?:   .*)?$", text.partition("examples:\n")[2], re.MULTILINE)
        assert found or command.prog == "agent-rl completion", command.prog
        for example in found:
            _parse(shlex.split(example.partition(" > ")[0])[1:])
        unexplained = [a.dest for a in command._actions if not a.help and a.option_strings]
        assert not unexplained, command.prog


def test_rollout_help_has_every_setting_of_policies() -> None:
    text = subcommands(make_parser())["rollout"].format_help()
    factories = [
        factory for factory in map(POLICIES.__getitem__, POLICIES) if factory.__module__.startswith("agent_rl.")
    ]
    of_factories = {key for factory in factories for key in inspect.signature(factory).parameters}
    assert not [key for key in of_factories - {"params", "env", "folder"} if f"policy.{key}" not in text]


def test_settings_of_help_are_not_given_twice() -> None:
    commands = subcommands(make_parser())
    assert "  env=" not in commands["check"].format_help() + commands["play"].format_help()
    assert "policy.name=" not in commands["chat"].format_help()


def test_train_config_prints_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "train", "--config", "algorithm=gspo", "rollout.groups=4")
    assert status == 0 and "# Tasks per step.\n  groups: 4" in out
    config = TrainConfig.model_validate(yaml.safe_load(out))
    assert config == load_config("backend/embedded", TrainConfig, ["algorithm=gspo", "rollout.groups=4"])


def test_train_help_lists_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert "rollout.groups=16" in out and "Tasks per step" in out and "judge.KEY=VALUE" in out
    assert "(Dettmers et al. 2021" in " ".join(out.split())  # a first sentence goes on behind an abbreviation


def test_train_dry_run_checks_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "train", "--dry-run", "steps=3")
    assert status == 0 and yaml.safe_load(out)["steps"] == 3
    for mistake, why in (
        ("env=calculater-v0", "Did you mean 'calculator-v0'"),
        ("split=tran", "Did you mean 'train'"),
        ("env_args.levl=2", "no argument 'levl'"),
        ("imports=[nowhere.py]", "nowhere.py does not exist; give the .py file"),
    ):
        status, _, err = call(capsys, "train", "--dry-run", mistake)
        assert status == 1 and why in err
    status, _, err = call(capsys, "train", "--dry-run", "algorithm=vineppo", "env=nim-v0")
    assert status == 1 and "has no snapshots" in err
