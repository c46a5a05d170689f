"""code-v0 and shell-v0 in real sandboxes of this machine: their oracles score, and cheats don't."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from agent_rl.core.episode import Episode, Outcome
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.envs import code, shell
from agent_rl.envs.quiz import one_call
from agent_rl.gym.registry import spec
from agent_rl.policy import Scripted, demonstrator, oracle
from agent_rl.rollout import Job, run_episode
from agent_rl.sandboxes import registry
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import skip_if_refused

IDS = ("code-v0", "shell-v0")


@pytest.fixture(autouse=True, scope="module")
def shared(runner: asyncio.Runner) -> Iterator[LocalSandboxes]:
    """The environments' backend, whose guarantees are not tried here."""
    sandboxes = LocalSandboxes(require=())
    with skip_if_refused():
        runner.run(runner.run(sandboxes.open()).close())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_shared", {'["local", {}]': sandboxes})
        yield sandboxes
    runner.run(sandboxes.close())


def play(runner: asyncio.Runner, id: str, policy: Scripted, task: Task, seed: int = 0) -> Episode:
    return runner.run(run_episode(Job(spec(id), task, seed), policy))


def answer(runner: asyncio.Runner, id: str, task: Task, messages: Sequence[str | Message]) -> Episode:
    return play(runner, id, Scripted(lambda env, seed: (message for message in messages)), task)


def tasks(id: str, split: str, n: int) -> list[Task]:
    return [spec(id).tasks.get(split, i) for i in range(n)]


def quick(task: Task) -> Task:
    """Return a task with fewer inputs to run."""
    return {**task, "examples": task["examples"][:1], "hidden": task["hidden"][:2]} if "hidden" in task else task  # type: ignore[index]


@pytest.mark.parametrize("id", IDS)
def test_oracle_solves_tasks(id: str, runner: asyncio.Runner, shared: LocalSandboxes) -> None:
    for split in spec(id).tasks.splits:
        episodes = [play(runner, id, oracle(), quick(task)) for task in tasks(id, split, 1)]
        assert [(e.success, e.reward, e.tool_errors) for e in episodes] == [(True, 1.0, {})]
    assert not [box for box in shared._open if box.fate.lost is None]


@pytest.mark.parametrize("id", IDS)
def test_splits_share_no_task(id: str) -> None:
    key = "question" if id == "code-v0" else "seed"
    train, dev, test = ({str(task[key]) for task in tasks(id, split, 30)} for split in ("train", "dev", "eval"))
    assert len(train) == 30 and not train & dev and not train & test and not dev & test
    assert tasks(id, "train", 5) == tasks(id, "train", 5)


@pytest.mark.parametrize("id", IDS)
def test_demonstrations_sometimes_fail(id: str, runner: asyncio.Runner) -> None:
    episodes = [play(runner, id, demonstrator(), quick(task), seed) for seed, task in enumerate(tasks(id, "train", 6))]
    assert {e.outcome for e in episodes} == {Outcome.TERMINATED}
    assert 0 < sum(bool(e.success) for e in episodes) < 6


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("text", ["", "done"])
def test_doing_nothing_earns_nothing(id: str, text: str, runner: asyncio.Runner) -> None:
    assert [answer(runner, id, task, [text]).reward for task in tasks(id, "eval", 2)] == [0.0] * 2


# code-v0

TASK = quick(code.make_task("train", 0))
EXAMPLES = {repr(given): expected for given, expected in TASK["examples"]}  # type: ignore[union-attr, misc]


def solution(text: str) -> Message:
    return one_call("write_file", path="solution.py", text=text)


CHEATS = {
    "lies about equality": "class Yes:\n    __eq__ = lambda *a: True\n    __hash__ = None\nsolve = lambda x: Yes()\n",
    "is a list that lies": "class Yes(list):\n    __eq__ = lambda *a: True\nsolve = lambda x: Yes()\n",
    "leaves early": "import os\nos._exit(0)\n",
    "exits": "import sys\nsolve = lambda x: sys.exit(0)\n",
    "prints what the examples return": f"for x in {list(EXAMPLES.values())}: print(x)\nsolve = lambda x: None\n",
    "knows the examples": f"solve = lambda x: {EXAMPLES!r}.get(repr(x))\n",
    "patches json": "import json\njson.dumps = lambda *a, **k: 'true'\nsolve = lambda x: None\n",
    "returns the input": "solve = lambda x: x\n",
    "never returns": "import signal\nsignal.pause()\n",
    "has no function": "x = 1\n",
}


@pytest.mark.parametrize("text", CHEATS.values(), ids=CHEATS)
def test_code_cheats_earn_nothing(text: str, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pause" in text:
        monkeypatch.setattr(code, "TIMEOUT", 0.2)
    episode = answer(runner, "code-v0", TASK, [solution(text), "done"])
    assert (episode.reward, episode.outcome) == (0.0, Outcome.TERMINATED)


PLACES = {
    "is a link": "import os; os.symlink('/etc/hostname', 'solution.py')",
    "is a folder": "import os; os.mkdir('solution.py')",
    "is another file": "open('solve.py', 'w').write('x')",
    "is gone with its sandbox": "import os, signal; os.kill(-1, signal.SIGKILL)",
}


@pytest.mark.parametrize("before", PLACES.values(), ids=PLACES)
def test_code_without_solution_earns_nothing(before: str, runner: asyncio.Runner) -> None:
    episode = answer(runner, "code-v0", TASK, [one_call("python", code=before), "done"])
    assert (episode.reward, episode.outcome) == (0.0, Outcome.TERMINATED)


def test_code_workplace_holds_no_tests(runner: asyncio.Runner) -> None:
    search = (
        "import os\ntexts = [open(f'{d}/{f}', errors='replace').read() for top in ('/work', '/tmp', '/proc/self') "
        "for d, _, names in os.walk(top) if d.count('/') < 4 for f in names "
        "if f in ('environ', 'cmdline') or not d.startswith('/proc')]\nprint(len(texts), texts)"
    )
    messages = [solution(str(TASK["code"])), one_call("run_tests"), one_call("python", code=search), "done"]
    episode = answer(runner, "code-v0", TASK, messages)
    found = episode.messages[-2].content
    hidden: list[list[JSON]] = TASK["hidden"]  # type: ignore[assignment]
    assert "def solve" in found and not [given for given, _ in hidden if repr(given) in found]
    assert episode.success


def test_code_tests_show_examples_only(runner: asyncio.Runner) -> None:
    messages = [solution("def solve(x): return 'no'"), one_call("run_tests"), "done"]
    wrong = answer(runner, "code-v0", TASK, messages).messages[-2].content
    assert wrong.startswith("example 1: returned 'no', not ") and len(wrong.splitlines()) == 1
    missing = answer(runner, "code-v0", TASK, [one_call("run_tests"), "done"]).messages[-2].content
    assert "solution.py" in missing


def test_code_hidden_values_differ() -> None:
    for task in tasks("code-v0", "eval", 15):
        values = [repr(value) for _, value in [*task["examples"], *task["hidden"]]]  # type: ignore[misc, list-item]
        assert len(set(values)) == len(values) == code.EXAMPLES + code.HIDDEN


# shell-v0

SHELL = {kind: next(t for t in tasks("shell-v0", "train", 50) if t["kind"] == kind) for kind in range(4)}


def world(kind: int) -> shell.World:
    return shell.world_of(SHELL[kind])


@pytest.mark.parametrize("kind", SHELL)
@pytest.mark.parametrize(
    ("after", "reward"),
    [
        ("touch another", 1.0),
        ("cat answer.txt; true", 1.0),
        ("echo x >> $(find . -type f | sort | head -1)", 0.0),
        ("rm -rf *", 0.0),
    ],
    ids=["adds", "reads", "changes", "removes"],
)
def test_shell_reward_is_of_the_final_state(kind: int, after: str, reward: float, runner: asyncio.Runner) -> None:
    messages = [one_call("shell", command=world(kind).command), one_call("shell", command=after), "done"]
    assert answer(runner, "shell-v0", SHELL[kind], messages).reward == reward


@pytest.mark.parametrize("kind", SHELL)
def test_shell_mistakes_earn_nothing(kind: int, runner: asyncio.Runner) -> None:
    made = world(kind)
    (right, *_) = [text for text in made.changes.values() if text is not None]
    for messages in ([one_call("shell", command=made.mistake), "done"], [right], [f"echo {right} > answer.txt"]):
        assert answer(runner, "shell-v0", SHELL[kind], messages).reward == 0.0


def test_shell_mistakes_are_mostly_wrong() -> None:
    questions = {shell.KINDS[int(str(t["kind"]))].__name__ for t in tasks("shell-v0", "eval", 40)}
    assert questions == {"_count", "_find", "_rename", "_fix"}
    for task in tasks("shell-v0", "eval", 40):
        made = shell.world_of(task)
        assert any(made.files.get(path) != text for path, text in made.changes.items())
        assert made.command != made.mistake
