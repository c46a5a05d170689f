"""`agent-rl check`: every broken environment is found by name, sound ones have no finding."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from tree import ROOT, run_python

import agent_rl as ar
from agent_rl.checks import floors
from agent_rl.checks.check import check_env
from agent_rl.checks.floors import floors_beside, rollout_floors
from agent_rl.checks.report import CheckReport
from agent_rl.checks.tools import schema_problem
from agent_rl.cli import main
from agent_rl.gym.registry import BUILTIN
from agent_rl.gym.tasks import EVALUATION_SEED
from agent_rl.rollout import group_jobs, split_jobs
from tests import fake_openai
from tests.broken_envs import BROKEN, HELD, Text, Vault, broken, spec_of
from tests.broken_envs import ROWS as VAULTS

ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| `[\w-]+-v\d+` \|", line)
]
"""The README's table of environments."""
SLOW = ("code-v0", "python-v0", "shell-v0", "sql-v0")
"""Checks of them run hundreds of programs in sandboxes: left to `make test-sandbox`."""
NEED_A_CORPUS = ("research-wordnet-v0", "wordnet-v0")
"""tests/adapters/test_wordnet_corpus.py checks them on one."""


def _slow_marked(ids: Iterable[str]) -> list[ParameterSet]:
    return [
        pytest.param(id, marks=[pytest.mark.sandbox] if id in SLOW else []) for id in ids if id not in NEED_A_CORPUS
    ]


def checked(spec: ar.EnvSpec, n: int = 4, seconds: float = 60.0) -> CheckReport:
    return check_env(spec, n=n, seed=0, seconds=seconds, env_args={})


@pytest.fixture(autouse=True)
def free_what_is_held() -> Iterator[None]:
    yield
    for held in HELD:
        if isinstance(held, subprocess.Popen):
            held.communicate()
        elif isinstance(held, threading.Event):
            held.set()
        elif hasattr(held, "close"):
            held.close()
            if held.name != os.devnull:
                Path(held.name).unlink()
    HELD.clear()


@broken("demonstrate")
class DemonstratesWithoutRng(Vault):
    def demonstrate(self):
        yield from self.oracle()


@broken("demonstrate")
class DemonstrationRaises(Vault):
    def demonstrate(self, rng):
        yield f"{self.box / 0}"


@broken("group reward")
class RanksTheFirst(Vault):
    @ar.group_reward(weight=0.5)
    def rank(self, group):
        return [1.0]


@broken("unscored")
class ScoresNothing(Vault):
    @ar.reward
    def correct(self, episode) -> float | None:
        return None


@pytest.mark.parametrize("name", BROKEN)
def test_check_finds_broken_environments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, check = BROKEN[name]
    if is_spin := name.startswith("Spins"):
        monkeypatch.setattr("agent_rl.checks.spins.SHORTEST", 1.0)
    report = checked(spec, seconds=0.05 if name == "Hangs" else 1.0 if is_spin else 60.0)
    assert {finding.check for finding in report.findings} == {check}, "\n".join(map(str, report.findings))
    finding = report.findings[0]
    assert finding.problem and finding.remedy
    assert name in finding.where or "@register" in finding.where or "Vault" in finding.where or "Text" in finding.where


@broken("hang")
class SpinsInStep(Vault):
    async def step(self, action):
        while True:
            self.looks += 1


@broken("hang")
class SpinsInTool(Vault):
    @ar.tool(inline=True)
    def look(self, box: int) -> str:
        """Look into a box."""
        while True:
            self.looks += 1


@broken("hang")
class SpinsInOracle(Vault):
    def oracle(self):
        while self.box is not None:
            self.looks += 1
        yield "never"


@broken("hang")
class SpinsInDemonstration(Vault):
    def demonstrate(self, rng):
        while rng is not None:
            self.looks += 1
        yield "never"


@broken("floor")
class CountsFirst(Vault):
    @ar.reward(weight=0)
    def correct(self, episode) -> int:
        return len(episode.messages)

    @ar.reward
    def found(self, episode) -> bool:
        return episode.final_text == f"{self.box}: {self.code}"


def test_floor_of_a_length_names_the_order_of_rewards() -> None:
    (finding,) = checked(BROKEN["CountsFirst"][0]).findings
    assert (
        "CountsFirst.correct" in finding.where
        and "'correct', of weight 0: define the task's own before" in finding.remedy
    )


class Weighs(Vault):
    @ar.tool(inline=True)
    def weigh(self, box: int) -> object:
        """Weigh a box."""
        return {"weight": object()}


def test_check_names_a_tool_whose_result_has_no_form() -> None:
    (finding,) = checked(spec_of(Weighs)).findings
    assert finding.check == "result" and "Weighs.weigh (" in finding.where
    assert "tool 'weigh'" in finding.problem and "type object has no JSON form" in finding.problem


def test_broken_environments_are_many() -> None:
    assert len(BROKEN) >= 30 and len({check for _, check in BROKEN.values()}) >= 17


class ShowsAnExample(Vault):
    """Opens with a dialogue of another vault."""

    def reset(self, task, rng):
        asked = ar.Message("user", super().reset(task, rng))
        shown = ar.Message("assistant", tool_calls=(ar.ToolCall("shown", "look", {"box": 77}),))
        found = ar.Message("tool", "ABC", tool_call_id="shown")
        return [ar.Message("user", "Which code is in box 77?"), shown, found, asked]


class TakesArguments(Vault):
    """Takes out of a call what it has read."""

    async def step(self, action):
        step = await super().step(action)
        for made in action.tool_calls:
            made.arguments.clear()
        return step


@pytest.mark.parametrize("cls", [Vault, Text, ShowsAnExample, TakesArguments])
def test_check_passes_sound_environments(cls: type[ar.Env]) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()
    report = checked(spec_of(cls))
    assert report.ok, "\n".join(map(str, report.findings))
    assert report.score("oracle", "eval").success.value == 1 and report.score("nothing", "eval").success.value == 0
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


@ar.register("sound-vault-v0", tasks=VAULTS, budget=ar.Budget(turns=6))
class Sound(Vault):
    pass


def test_check_passes_on_what_gymnasium_objects_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(ar.spec("sound-vault-v0")).ok

    def object_to(env: object) -> None:
        warnings.warn("\x1b[33mWARN: too colourful\x1b[0m", stacklevel=2)

    monkeypatch.setattr("gymnasium.utils.env_checker.check_env", object_to)
    (finding,) = checked(ar.spec("sound-vault-v0")).findings
    assert (finding.check, finding.problem) == ("gymnasium", "WARN: too colourful") and "Sound" in finding.where


def test_finding_names_file_and_line() -> None:
    (finding,) = checked(BROKEN["TrustsText"][0]).findings
    source = Path(__file__).with_name("broken_envs.py").read_text().splitlines()
    line = int(finding.where.rpartition(":")[2].rstrip(")"))
    assert "broken_envs.py:" in finding.where and "int(action.content)" in source[line - 1]
    assert "ValueError in step after the reply" in finding.problem


@pytest.mark.parametrize("does", ["raise KeyboardInterrupt", "path.write_text('a sandbox that waits')"])
def test_check_leaves_no_temporary_folder(does: str, tmp_path: Path) -> None:
    code = f"""
import asyncio, tempfile
from pathlib import Path
from types import SimpleNamespace
from agent_rl.checks.leaks import check_leaks

async def play_again(example):
    path = Path(tempfile.gettempdir()) / "once"
    {does}

tempfile.tempdir = {str(tmp_path)!r}
bench = SimpleNamespace(examples=lambda: [1], keeping=lambda: (SimpleNamespace(play_again=play_again), []))
asyncio.run(check_leaks(bench))
"""
    ran = run_python("-c", code)
    assert ("KeyboardInterrupt" in ran.stderr) == (ran.returncode != 0), ran.stderr
    assert not [*tmp_path.iterdir()]


def test_leak_is_named() -> None:
    kinds = {"LeaksFile": "open file", "LeaksThread": "left-behind", "LeaksTask": "sleep"}
    for name, said in kinds.items():
        (finding,) = checked(BROKEN[name][0], n=1).findings
        assert said in finding.problem


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "objekt"}, "type 'objekt'"),
        ({"properties": []}, "properties"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"properties": {"a": 3}}, "3 is no schema"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}}, "leads nowhere"),
        ({"items": {"enum": []}}, "enum"),
        ({"anyOf": 3}, "no schema"),
        ({"default": float("nan")}, "JSON"),
    ],
)
def test_schema_problem_names_mistakes(schema: dict[str, ar.JSON], problem: str) -> None:
    assert problem in schema_problem(schema, schema)


def test_schema_problem_passes_valid_schemas() -> None:
    schema: dict[str, ar.JSON] = {
        "type": "object",
        "$defs": {"A": {"type": ["integer", "null"]}},
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"anyOf": [{"enum": ["x"]}, {"items": True}]}},
        "required": ["a"],
    }
    assert schema_problem(schema, schema) == ""


def test_check_takes_demonstrations_for_what_ends() -> None:
    carts = spec_of(ar.from_gym("CartPole-v1"), budget=ar.Budget(turns=60))
    assert "termination" not in {finding.check for finding in checked(carts, n=2).findings}
    endless = type("Endless", (Vault,), {"on_answer": lambda self, action: ar.Step("?"), "oracle": ar.Env.oracle})
    (found,) = (finding for finding in checked(spec_of(endless), n=2).findings if finding.check == "termination")
    assert found.problem == "the environment ended none of 16 episodes"


def test_check_command_exits_by_its_findings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "coin.py"
    file.write_text(
        "import agent_rl as ar\n"
        "@ar.register('coin-v0', tasks=[{'side': s} for s in 'abcd'])\n"
        "class Coin(ar.ToolEnv):\n"
        "    def reset(self, task, rng): return 'heads or tails?'\n"
        "    @ar.reward\n"
        "    def correct(self, episode): return bool(episode.final_text)\n"
    )
    assert main(["check", "--import", str(file), "coin-v0", "n=2"]) == 1
    out = capsys.readouterr().out
    assert "nothing 2 of 2 on 'train'" in out and "coin.py:5" in out
    assert "oracle is not checked" in out and "1 finding" in out
    assert main(["check", "search-v0", "n=2"]) == 0
    assert "no finding" in capsys.readouterr().out
    assert main(["check", "search-v0", "n=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["scores"][0]["success"] == 1.0


@pytest.mark.parametrize("env", _slow_marked(sorted(BUILTIN)))
def test_check_passes_builtin_environments(env: str) -> None:
    report = ar.check(env, n=1, seconds=600)
    assert report.ok, "\n".join(map(str, report.findings))


@pytest.mark.parametrize("env", _slow_marked(row[0] for row in ROWS))
def test_readme_table_has_the_floors_of_each_environment(env: str) -> None:
    spec, origin = ar.spec(env), ar.Origin("eval", "eval")
    tasks = spec.tasks.distinct("eval", 16)
    jobs = [job for task in tasks for job in group_jobs(spec, task, 1, EVALUATION_SEED, origin=origin)]
    (stated,) = [row[2:] for row in ROWS if row[0] == env]
    assert stated == [str(score) for score in asyncio.run(rollout_floors(jobs))]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serch-v0"], "Did you mean 'search-v0'"),
        (["search-v0", "tasks=3"], "no setting 'tasks'"),
        (["search-v0", "env=search-v0"], "without `env=`"),
        (["search-v0", "env_args.depth=3"], "no argument 'depth'"),
        (["search-v0", "n=0"], "n=0"),
    ],
)
def test_check_command_explains_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 1
    assert said in capsys.readouterr().err


def test_rollout_prints_floors_beside_its_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["env=calculator-v0", "policy=constant", "policy.text=4", "n=3", "samples=2", "floors=true"]
    assert main(["rollout", *words, f"out={tmp_path}/e.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "On the same tasks: oracle 100.0%, random 0.0%, empty 0.0%, nothing 0.0%, constant" in out


def test_floors_are_beside_results_within_their_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, out = ["rollout", "env=guess-v0", "policy=nothing", "n=40"], tmp_path / "e.jsonl"
    monkeypatch.setattr(floors, "SECONDS", 600.0)
    assert main([*played, f"out={out}"]) == 0
    assert "On the first 32 of these tasks: oracle 100.0%, random" in capsys.readouterr().out
    assert json.loads(out.with_suffix(".results.json").read_text())["floors"]["oracle"]["success"] == 1
    monkeypatch.setattr(floors, "SECONDS", 1e-9)
    assert main([*played, f"out={tmp_path}/late.jsonl"]) == 0
    assert "of these tasks: not known (floors=true takes the time for all)" in capsys.readouterr().out
    assert main([*played, "floors=false", f"out={tmp_path}/none.jsonl"]) == 0
    assert "these tasks" not in capsys.readouterr().out


def test_floors_ask_no_model_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Talk(ar.DialogueEnv):
        async def reset(self, task, rng):
            self.user = ar.ModelUser(ar.OpenAIPolicy("m", base_url=server.url), "You are a customer.")
            return await self.open_dialogue()

    monkeypatch.setattr(floors, "SECONDS", 600.0)
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with fake_openai.FakeOpenAI(lambda body: fake_openai.said("hello")) as server:
        ar.register("talk-v0", tasks=[{"n": 1}], budget=ar.Budget(turns=2))(Talk)
        jobs = split_jobs(ar.spec("talk-v0"), 1, 1, 0, origin=ar.Origin("eval", "train"))
        assert floors_beside(jobs, None, 0.0) == {} and not server.asked
