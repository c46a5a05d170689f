"""`agent-rl play search-v0` and policy=human: a person at the prompt, through a pipe and a terminal."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import Message
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.human import HumanPolicy, Question, QuitError, read_reply, signature
from agent_rl.store.episodes import read_episodes
from agent_rl.view.person import Person
from tests.doubles import CALL, run_dice
from tests.tree import ROOT

SEARCH = ToolSpec(
    "search",
    "Find passages.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "k": {"type": "integer", "default": 5},
            "newest": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
        },
        "required": ["query"],
    },
)
ROLL = ToolSpec("roll", "Roll the die.", {"type": "object", "properties": {}})
PLACE = ToolSpec("place", "", {"properties": {"at": {"type": "object"}, "tags": {"type": "array"}}})
NAME = ToolSpec("name", "", {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]})
COUNT = ToolSpec("count", "", {"properties": {"of": {"type": "array"}}})
TOOLS = (SEARCH, ROLL, NAME, PLACE, COUNT)


@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        ('/call search query="red chair" k=3 newest=true', {"query": "red chair", "k": 3, "newest": True}),
        ("/call search query=7", {"query": "7"}),
        ('/call search {"query": "x", "k": 1}', {"query": "x", "k": 1}),
        ("/call name a man = his name", {"of": "a man = his name"}),
        ("  /call roll", {}),
        ('/call place at={"a": "b c"} tags=["x", [1]]', {"at": {"a": "b c"}, "tags": ["x", [1]]}),
        ("/call place at='{\"a\": 1}' tags=[1,2]", {"at": {"a": 1}, "tags": [1, 2]}),
        ('/call place at={a tags="[1]"', {"at": "{a", "tags": [1]}),
        ('/call search query={"a":1} k=3', {"query": '{"a":1}', "k": 3}),
        ('/call search query="tags=[1] #2"', {"query": "tags=[1] #2"}),
        ('/call count ["x y"]', {"of": ["x y"]}),
        ('/call name len("a b")', {"of": 'len("a b")'}),
        ("/call name of=print('a\\nb')", {"of": "print('a\\nb')"}),
        ('/call name "a \\"b\\""', {"of": 'a "b"'}),
        ("/call search k=3 query=a\\ b", {"query": "a b", "k": 3}),
    ],
)
def test_read_reply_types_arguments_by_schema(typed: str, arguments: dict[str, object]) -> None:
    (call,) = read_reply(typed, TOOLS, 2).tool_calls
    assert (call.arguments, call.id, call.error) == (arguments, "call_2_0", None)


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("/call serch query=x", "no tool 'serch'. Did you mean 'search'? There are: search, roll, name, place, count."),
        ("/call search k=3", "query is missing; write /call search query=... [k=5] [newest=null]"),
        ("/call search query=x n=3", "'n=3' is no argument; write /call search query=..."),
        ('/call search "x', "No closing quotation; write /call search"),
        ('/call search {"query', "the arguments are no JSON"),
        ("/call name of=x to=y", "'to=y' is no argument"),
        ('search {"query": "x"}', 'a tool is called by /call: write /call search {"query": "x"}'),
        ("search k=3 query=x", "a tool is called by /call: write /call search k=3 query=x"),
    ],
)
def test_read_reply_refuses_what_does_not_fit(typed: str, problem: str) -> None:
    with pytest.raises(ValueError, match="^" + problem.replace("[", r"\[").replace("?", r"\?").replace(".", r"\.")):
        read_reply(typed, TOOLS, 0)


def test_read_reply_takes_text_and_calls() -> None:
    reply = read_reply("let me see\n/call roll\n/call name x", TOOLS, 0)
    assert (reply.content, [c.name for c in reply.tool_calls]) == ("let me see", ["roll", "name"])
    for text in (" 4 2 ", "search", "name x", 'researched {"query": "x"}', "roll {\n}"):
        assert read_reply(text, TOOLS, 0) == Message("assistant", text)
    assert signature(ROLL) == "roll"


def person(lines: Iterable[str]) -> tuple[Person, io.StringIO]:
    """Return a person who types lines, then Ctrl-D, and what they see."""
    typed, shown = iter(lines), io.StringIO()

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    return Person(Console(file=shown, width=100), read), shown


def test_person_shows_no_control_characters() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J[bold]x[/bold]\u202e"
    asked, shown = person(["/tools", "/help", "/nothing", "ok"])
    tool = ToolSpec("t\x1b[2J", hostile, {"properties": {"a\x1b": {"type": "string", "description": hostile}}})
    reply = asked(Question((Message("user", hostile), Message("tool", hostile, name=hostile)), (tool,), 0))
    assert reply.content == "ok" and "[bold]x[/bold]" in shown.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & {*shown.getvalue()}


def test_person_types_several_lines() -> None:
    asked, _ = person(["one\\", "two"])
    assert asked(Question((), (), 0)).content == "one\ntwo"
    asked, _ = person(['"""', "/quit", "", "end", '"""'])
    assert asked(Question((), (), 0)).content == "/quit\n\nend"
    asked, _ = person(["//quit"])
    assert asked(Question((), (), 0)).content == "/quit"
    asked, shown = person(["", "/undo"])
    with pytest.raises(QuitError):  # by Ctrl-D
        asked(Question((), (), 0))
    assert "no reply to take back" in shown.getvalue()


def test_human_policy_plays_an_episode() -> None:
    asked, _ = person(["/call roll", "/call roll", "/call roll", "6"])
    episode = run_dice(HumanPolicy(asked))
    assert episode.reward == 1.0 and episode.turns == 4 and episode.messages[1].tool_calls[0].name == "roll"
    assert episode.messages[1].tool_calls[0].id == "call_0_0" and CALL.tool_calls[0].name == "roll"


def play(monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["play", *words])


def test_play_stores_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "demonstrations.jsonl"
    assert play(monkeypatch, "/call search x\n/undo\n/call search y\nnobody\n", "search-v0", f"out={file}") == 0
    shown = capsys.readouterr().out
    assert "ok, done after 2 turns: reward 0.1 (correct 0, clean 1)" in shown and f"1 episode in {file}" in shown
    assert play(monkeypatch, "a\n/call search z\n/quit\n", "search-v0", "n=3", f"out={file}") == 0
    first, second, third = read_episodes(file)
    assert first.messages[1].tool_calls[0].arguments == {"query": "y"} and first.parent is None
    assert first.origin.purpose == "demonstration" and first.origin.split == "train" and first.success is False
    assert len({e.group_id for e in (first, second, third)}) == 3, "each is of another task"
    assert (third.stop_reason, third.turns, third.reward) == (StopReason.TURNS, 1, 0.0)
    capsys.readouterr()
    assert play(monkeypatch, "/quit\n", "search-v0", f"out={tmp_path}/none") == 0 and not (tmp_path / "none").exists()
    assert "Nothing was played" in capsys.readouterr().out
    assert play(monkeypatch, "/drop\n", "search-v0", f"out={file}") == 130 and len(list(read_episodes(file))) == 3


def test_play_begins_again_where_undo_does_not_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Timed(ar.ToolEnv):
        """Has a clock, which no replay repeats."""

        ticks = itertools.count()

        def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
            return "go"

        @ar.tool
        def now(self) -> str:
            """Tell the time."""
            return str(next(self.ticks))

        @ar.reward
        def right(self, episode: Episode) -> float:
            return 1.0

    ar.register("timed-play-v0", tasks=[{"n": 0}])(Timed)
    file = tmp_path / "timed.jsonl"
    typed = "/call now\n/call now\n/undo\n/call now\ndone\n"
    assert play(monkeypatch, typed, "timed-play-v0", f"out={file}") == 0
    out = capsys.readouterr().out
    assert "does not repeat itself" in out and "play from the beginning again" in out
    (episode,) = read_episodes(file)
    assert (episode.turns, episode.final_text, episode.messages[2].content) == (2, "done", "3")


def test_play_passes_over_tasks_that_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Said(ar.ToolEnv):
        """Any answer will do."""

        def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
            return "go"

    ar.register("doubled-v0", tasks={"train": [{"n": 0}] * 3 + [{"n": 1}], "eval": [{"n": 9}]})(Said)
    file = tmp_path / "said.jsonl"
    assert [play(monkeypatch, "x\n", "doubled-v0", f"out={file}") for _ in range(3)] == [0, 0, 1]
    assert [episode.task["n"] for episode in read_episodes(file)] == [0, 1]


def fork(monkeypatch: pytest.MonkeyPatch, played: str, typed: str, folder: Path) -> tuple[Episode, list[Episode]]:
    """Play an episode, and fork it at its second turn; return it and what the fork stored."""
    file, out = folder / "a.jsonl", folder / "forks.jsonl"
    assert play(monkeypatch, played, "search-v0", f"out={file}") == 0
    (parent,) = read_episodes(file)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["replay", "fork", str(file), parent.id, "--at-turn", "1", "policy=human", f"out={out}"]) == 0
    return parent, [*read_episodes(out)] if out.exists() else []


def test_fork_asks_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "/undo\n/call search z\n/undo\nsomeone\n"
    parent, (child,) = fork(monkeypatch, "/call search x\n/call search y\nnobody\n", typed, tmp_path)
    assert (child.parent, child.final_text, child.turns) == ((parent.id, 1), "someone", 2)
    assert "is the parent's: it can't be taken back" in capsys.readouterr().out


def test_fork_that_a_person_quits_at_once_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fork(monkeypatch, "/call search x\nnobody\n", "/quit\n", tmp_path)[1] == []
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("forks")] == []
    assert "Nothing was played, so nothing is stored." in capsys.readouterr().out


def test_play_says_what_breaks_before_the_first_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unopened(ar.Env):
        """Never opens."""

        def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
            raise KeyError("no such thing")

    ar.register("unopened-v0", tasks=[{}])(Unopened)
    assert play(monkeypatch, "x\n", "unopened-v0", f"out={tmp_path}/none.jsonl") == 1
    assert "unopened-v0: reset raised KeyError: 'no such thing'" in capsys.readouterr().err


ENV = '''
import agent_rl as ar

@ar.register("hostile-v0", tasks={"train": [{"x": i} for i in range(3)]})
class Hostile(ar.ToolEnv):
    def reset(self, task, rng):
        return "say it"

    @ar.tool
    def read(self) -> str:
        """Read what is there."""
        return "\\x1b[2J\\x1b]0;owned\\x07read"

    @ar.reward
    def right(self, episode) -> float:
        return 1.0
'''


def test_play_ends_cleanly_on_a_terminal(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    (tmp_path / "hostile.py").write_text(ENV)
    here: dict[str, Any] = {"cwd": str(tmp_path), "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    words = ["-m", "agent_rl", "play", "hostile-v0", "--import", "hostile.py", "n=3", "out=d.jsonl"]
    with pexpect.spawn(sys.executable, words, encoding="utf-8", timeout=600, **here) as terminal:
        seen = io.StringIO()
        terminal.logfile_read = seen
        terminal.expect("turn 0> ")
        terminal.sendline("/call read")
        terminal.expect("turn 1> ")
        terminal.sendline("done")
        terminal.expect("turn 0> ")
        terminal.sendline("/call read")
        terminal.expect("turn 1> ")
        terminal.sendcontrol("c")
        terminal.expect("Dropped; 1 before it")
        terminal.expect(pexpect.EOF)
    assert terminal.exitstatus == 130 and "\x1b[2J" not in seen.getvalue() and "␛[2J" in seen.getvalue()
    assert [e.final_text for e in read_episodes(tmp_path / "d.jsonl")] == ["done"]
    with pexpect.spawn(sys.executable, words, encoding="utf-8", timeout=600, **here) as terminal:
        terminal.expect("turn 0> ")
        terminal.sendcontrol("d")
        terminal.expect("Nothing was played")
        terminal.expect(pexpect.EOF)
    assert terminal.exitstatus == 0
