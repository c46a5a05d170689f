"""The tools that run code, and python-v0, in real sandboxes of this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from agent_rl.core.episode import Episode, Outcome
from agent_rl.core.messages import Message, Task, ToolCall
from agent_rl.envs.python import FAMILIES, make_task
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.gym.env import Script, ToolEnv
from agent_rl.gym.registry import spec
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.policy import Scripted, demonstrator, oracle
from agent_rl.rollout import Evaluation, Job, run_episode, run_jobs, summarise
from agent_rl.sandboxes import registry
from agent_rl.sandboxes.calls import ExecResult, PythonResult
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.pool import WarmPool
from agent_rl.sandboxes.registry import make_backend, shared_backend
from agent_rl.tools import python as python_tool
from agent_rl.tools import shell as shell_tool
from agent_rl.tools.files import files
from agent_rl.tools.python import python
from agent_rl.tools.shell import shell


class Workbench(SandboxedEnv):
    """All tools on one sandbox."""

    extra_tools = (python, shell, *files)

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        await self.open_sandbox()
        return "go"


@pytest.fixture(autouse=True)
def shared(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSandboxes]:
    """One backend for the tests of this file, whose guarantees are not tried each time."""
    sandboxes = LocalSandboxes(require=())
    try:
        runner.run(runner.run(sandboxes.open()).close())
    except SandboxError as error:
        pytest.skip(f"the kernel refuses: {error}")
    monkeypatch.setattr(registry, "_shared", {'["local", {}]': sandboxes})
    yield sandboxes
    runner.run(sandboxes.close())


def said(runner: asyncio.Runner, *calls: tuple[str, dict[str, str]]) -> list[str]:
    """What the tools answer to calls, one after the other, in one episode."""

    async def main() -> list[str]:
        env = Workbench()
        await env.reset({}, np.random.default_rng(0))
        answers = []
        for name, arguments in calls:
            (answer,) = (await env.step(Message("assistant", tool_calls=(ToolCall("c", name, arguments),)))).observation
            answers.append(answer.content)
        await env.close()
        return answers

    return runner.run(main())


def test_tools_share_variables_and_files(runner: asyncio.Runner) -> None:
    assert said(
        runner,
        ("python", {"code": "x = 20\nopen('a.txt', 'w').write('one')"}),
        ("python", {"code": "print('hi')\nx + 1"}),
        ("shell", {"command": "cat a.txt; exit 3"}),
        ("edit_file", {"path": "a.txt", "old": "one", "new": "two"}),
        ("read_file", {"path": "a.txt"}),
        ("write_file", {"path": "b/c.txt", "text": "ü"}),
        ("shell", {"command": "ls b"}),
    ) == ["3", "hi\n21", "one\nexit status 3", "edited a.txt", "two", "wrote 2 bytes", "c.txt"]


def test_tools_report_failures_as_text(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "TIMEOUT", 0.5)
    monkeypatch.setattr(shell_tool, "TIMEOUT", 0.5)
    raised, late, gone, slow, missing, twice = said(
        runner,
        ("python", {"code": "x = 1\n1 / 0"}),
        ("python", {"code": "while True: pass"}),
        ("python", {"code": "x"}),
        ("shell", {"command": "echo before; sleep 30"}),
        ("read_file", {"path": "nothing"}),
        ("edit_file", {"path": "/etc/passwd", "old": "", "new": "x"}),
    )
    assert "ZeroDivisionError" in raised and "its variables are gone" not in raised
    assert "timeout" in late and "its variables are gone" in late
    assert "NameError" in gone
    assert slow == "before\ntimeout: the command took too long and was killed"
    assert missing.startswith("error: FileAccessError") and "nothing" in missing
    assert "occurs 0 times" in twice


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (PythonResult("a\n", "b\n", value="3"), "a\nb\n3"),
        (PythonResult("", ""), ""),
        (PythonResult("a", "", error="Traceback\nE\n", state_lost=True), "a\nTraceback\nE\nthe interpreter was"),
    ],
)
def test_python_tool_describes_results(result: PythonResult, text: str) -> None:
    assert python_tool.described(result).startswith(text) and (text or not python_tool.described(result))


def test_shell_tool_describes_results() -> None:
    ended = ExecResult(-9, "a\n", "")
    assert shell_tool.described(ended) == "a\nexit status -9"
    assert "timeout" in shell_tool.described(replace(ended, timed_out=True))


def test_tool_specs_omit_the_environment() -> None:
    assert {t.name: list(t.parameters["properties"]) for t in Workbench().tools} == {  # type: ignore[arg-type]
        "python": ["code"],
        "shell": ["command"],
        "read_file": ["path"],
        "write_file": ["path", "text"],
        "edit_file": ["path", "old", "new"],
    }


# The backend of an environment


def test_episode_fails_without_a_sandbox(runner: asyncio.Runner, shared: LocalSandboxes) -> None:
    async def refuse(**_: object) -> None:
        raise SandboxError("none")

    shared.open = refuse  # type: ignore[method-assign, assignment]
    episode = runner.run(run_episode(Job(spec("python-v0"), make_task("train", 0), 0), oracle()))
    assert episode.outcome is Outcome.FAILED and episode.reward is None


def test_episodes_close_their_sandboxes(runner: asyncio.Runner, shared: LocalSandboxes) -> None:
    played = runner.run(run_jobs([Job(spec("python-v0"), make_task("train", i), i) for i in range(8)], oracle()))
    assert len(played) == 8 and not [box for box in shared._open if box.fate.lost is None]


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("dokcer", {}, "Did you mean 'docker'"),
        ("docker", {"imag": "x"}, "It takes: image"),
        ("local", {"warm": 0}, "warm=0"),
        ("docker", {"host": "ssh://x"}, "unix://"),
        ("docker", {"require": ["fles"]}, "Did you mean 'files'"),
    ],
)
def test_make_backend_refuses_wrong_names_and_options(name: str, options: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        make_backend(name, options)  # type: ignore[arg-type]


def test_shared_backend_returns_one_per_options() -> None:
    assert shared_backend("local") is shared_backend("local", {})
    assert isinstance(shared_backend("local", {"warm": 2}), WarmPool)


def test_forked_process_makes_its_own_backend() -> None:
    """The zygote of its parent can't be its child: it waited for that without end."""
    ours = shared_backend("local")
    child = os.fork()
    if not child:
        os._exit(int(shared_backend("local") is ours))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared_backend("local") is ours


def test_workbench_requires_open_sandbox() -> None:
    with pytest.raises(RuntimeError, match="open_sandbox"):
        print(Workbench().sandbox)
    assert issubclass(Workbench, ToolEnv)


# python-v0


def played(runner: asyncio.Runner, split: str, policy: Scripted, n: int) -> list[Episode]:
    return runner.run(run_jobs([Job(spec("python-v0"), make_task(split, i), i) for i in range(n)], policy))


@pytest.mark.parametrize("split", spec("python-v0").tasks.splits)
def test_python_oracle_solves_every_task(runner: asyncio.Runner, split: str) -> None:
    episodes = played(runner, split, oracle(), 40)
    assert {e.success for e in episodes} == {True} and {e.value("clean") for e in episodes} == {1.0}
    assert len({int(str(e.task["kind"])) for e in episodes}) == len(FAMILIES)


def test_python_mistakes_are_mostly_wrong() -> None:
    """Also shows that an answer belongs to its expression: both are evaluated here."""
    agree = 0
    for i in range(200):
        task = make_task("train", i)
        family, values = FAMILIES[int(str(task["kind"]))], task["values"]
        assert isinstance(values, dict)
        assert str(eval(family.code.format(**values))) == task["answer"]
        agree += str(eval(family.mistake.format(**values))) == task["answer"]
    assert agree < 40


def test_python_splits_share_no_task() -> None:
    train, dev, test = (
        {str(make_task(split, i)["question"]) for i in range(300)} for split in ("train", "dev", "eval")
    )
    assert not train & dev and not train & test and not dev & test and len(train) > 250


def test_demonstrations_are_well_formed_but_often_fail(runner: asyncio.Runner) -> None:
    result = summarise(played(runner, "train", demonstrator(), 60))
    assert result.failed == 0 and 0.1 < result.success.value < 0.7


@pytest.mark.parametrize(
    ("code", "reward"), [("1/0", 1.0), ("print('Traceback')", 1.1), ("'' '", 1.0)], ids=["raises", "prints", "syntax"]
)
def test_clean_reward_fails_raising_code_only(code: str, reward: float, runner: asyncio.Runner) -> None:
    task = make_task("train", 0)

    def raise_then_answer() -> Script:
        yield Message("assistant", tool_calls=(ToolCall("c", "python", {"code": code}),))
        yield str(task["answer"])

    script = Scripted(lambda env, seed: raise_then_answer())
    episode = runner.run(run_episode(Job(spec("python-v0"), task, 0), script))
    assert episode.reward == pytest.approx(reward)


ATTACK = """
import ctypes, os, resource
for pid in {os.getppid(), 1}:
    try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
    except OSError: pass
if os.fork() == 0:
    os.closerange(0, 20)
    ctypes.CDLL(None).prctl(15, b"\\xff")
    while True: pass
os._exit(0)
"""


def test_sandbox_attack_leaves_the_success_rate(runner: asyncio.Runner) -> None:
    """The policy is right on every other task, and attacks on the others to avoid a score."""

    def answer(i: int, attack: bool) -> Script:
        for _ in range(2 if attack and i % 2 else 0):
            yield Message("assistant", tool_calls=(ToolCall("c", "python", {"code": ATTACK}),))
        yield "wrong" if i % 2 else str(make_task("train", i)["answer"])

    async def play(attack: bool) -> Evaluation:
        jobs = [Job(spec("python-v0"), make_task("train", i), i) for i in range(8)]
        scripts = [Scripted(lambda _, i=i: answer(i, attack)) for i in range(8)]  # type: ignore[misc]
        return summarise([await run_episode(job, script) for job, script in zip(jobs, scripts, strict=True)])

    plain, attacking = runner.run(play(False)), runner.run(play(True))
    assert plain.failed == attacking.failed == 0
    assert plain.success == attacking.success and attacking.success.value == 0.5
