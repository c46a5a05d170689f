"""Episodes in other systems' formats, and conversations of theirs as episodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from agent_rl.cli import main
from agent_rl.core.episode import Episode, Reward, StepRecord
from agent_rl.core.images import Image
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Span, Trajectory
from agent_rl.core.turns import turns
from agent_rl.errors import ConfigError
from agent_rl.formats.chat import chat_messages
from agent_rl.formats.reading import import_episodes
from agent_rl.formats.rows import IGNORED, preference_rows
from agent_rl.formats.writing import LINES, export_episodes
from agent_rl.rendering.hermes import read_call
from agent_rl.store import index
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from tests.doubles import example_episode

CALLS = (ToolCall("a", "search", {"query": "\ud800 <b>", "n": 2}), ToolCall("b", "broken", error="no JSON"))
MESSAGES = (
    Message("system", "Use tools."),
    Message("user", "How many?"),
    Message("assistant", "", reasoning="I look.", tool_calls=CALLS),
    Message("tool", "two", tool_call_id="a", name="search"),
    Message("tool", "error: no JSON", tool_call_id="b", name="broken", tool_error=ToolErrorKind.MALFORMED),
    Message("assistant", "2"),
)
STEPS = (StepRecord(2, 0.5, terminated=False, truncated=False), StepRecord(0, 0.0, terminated=True, truncated=False))


def talked(id: str = "e0", **changes: Any) -> Episode:
    """An episode of two turns: reasoning, two calls, one of them broken, and an answer."""
    given = {"messages": MESSAGES, "steps": STEPS, "task": {"question": "How many?"}, **changes}
    return example_episode(id, **given)


def sampled(ids: list[int], *, at: int, prompt: list[int], fork: Fork | None = None) -> Trajectory:
    trajectory = Trajectory(fork)
    trajectory.append(prompt, Source.PROMPT, at)
    logprobs = tuple(-0.5 for _ in ids)
    trajectory.append_completion(Completion(tuple(ids), logprobs, FinishReason.STOP, (7,) * len(ids)), at)
    return trajectory


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("format", ["openai", "atif"])
@pytest.mark.parametrize("name", ["there.jsonl", "there.json"])
def test_conversation_survives_the_way_there_and_back(format: str, name: str, tmp_path: Path) -> None:
    given = talked(rewards=(Reward("exact", 1.0), Reward("short", 0.5, weight=0.5)))
    file = tmp_path / name
    if name.endswith("l"):
        assert export_episodes([given], file, format) == 1
    else:
        row = json.loads(json.dumps(next(LINES[format]([given]))))
        file.write_text(json.dumps([row]))
    (found,) = import_episodes(file)
    said = [replace(m, tool_calls=()) for m in given.messages]
    assert [replace(m, tool_calls=()) for m in found.messages] == said
    first, second = found.messages[2].tool_calls
    assert (first.id, first.name, first.arguments["n"], second.error) == ("a", "search", 2, "no JSON")
    assert (found.id, found.env, found.task, found.reward) == (given.id, given.env, given.task, given.reward)
    assert [len(t.messages) for t in turns(found)] == [2, 3, 1]


@pytest.mark.parametrize("format", ["openai", "atif"])
def test_import_reads_calls_that_could_not_be_read(format: str, tmp_path: Path) -> None:
    call = ToolCall("b", "", error="not closed")
    given = talked(messages=(*MESSAGES[:2], replace(MESSAGES[2], tool_calls=(CALLS[0], call)), *MESSAGES[3:]))
    assert export_episodes([given], tmp_path / "there.jsonl", format) == 1
    (found,) = import_episodes(tmp_path / "there.jsonl")
    assert found.messages[2].tool_calls[1] == call


def test_sft_rows_have_a_loss_on_sampled_tokens_once() -> None:
    first = sampled([11, 12], at=0, prompt=[1, 2, 3])
    fork = Trajectory.restore(
        [1, 2, 3, 11, 12, 9, 13],
        [*first.spans, Span(5, 6, Source.ENV, 0), Span(6, 7, Source.POLICY, 1, 7)],
        [-0.5] * 3,
        forked_from=Fork(0, 5),
    )
    rows = list(LINES["sft"]([talked(trajectories=(first, fork)), talked("plain", trajectories=())]))
    assert [row.get("loss_mask") for row in rows] == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1], None]
    assert rows[1]["labels"] == [*[IGNORED] * 6, 13]
    assert [m.get("weight") for m in rows[2]["messages"]] == [None, None, 1, None, None, 1]  # type: ignore[union-attr, index]


def test_examples_in_an_opening_are_no_replies() -> None:
    shown = (MESSAGES[0], Message("user", "1?"), Message("assistant", "1"), *MESSAGES[1:])
    (row,) = LINES["sft"]([talked(messages=shown, trajectories=())])
    assert [m["weight"] for m in row["messages"] if m["role"] == "assistant"] == [0, 1, 1]  # type: ignore[union-attr, index]
    (row,) = LINES["atif"]([talked(messages=shown, trajectories=(sampled([11, 12], at=0, prompt=[1, 2, 3]),))])
    example, first, _ = (step for step in cast("Any", row["steps"]) if step["source"] == "agent")
    assert "metrics" not in example and first["metrics"]["completion_token_ids"] == [11, 12]
    assert first["extra"]["reward"] == 0.5


def test_preferences_are_the_best_and_worst_of_a_group() -> None:
    def sample(id: str, reward: float | None, group: str, *, opening: str = "How many?") -> Episode:
        messages = (MESSAGES[0], Message("user", opening), *MESSAGES[2:])
        return talked(id, group_id=group, messages=messages, rewards=(Reward("r", reward),))

    episodes = [
        *(sample(f"a{n}", reward, "a") for n, reward in enumerate((0.2, 1.0, None, 0.0))),
        *(sample(f"same{n}", 1.0, "same") for n in range(2)),
        *(sample(f"b{n}", float(n), "b", opening=f"{n}?") for n in range(2)),
    ]
    (pair,) = LINES["preferences"](episodes)
    assert (pair["chosen_id"], pair["rejected_id"], pair["chosen_reward"]) == ("a1", "a3", 1.0)
    assert [m["role"] for m in pair["prompt"]] == ["system", "user"]  # type: ignore[union-attr, index]
    called: Any = pair["chosen"]  # chat templates write arguments as JSON: of a text they would make a text in quotes
    assert [c["function"]["arguments"] for c in called[0]["tool_calls"]] == [dict(c.arguments) for c in CALLS]


def test_preferences_ignore_rounding_and_episodes_without_a_reply() -> None:
    summed = talked("summed", rewards=(Reward("r", 0.1), Reward("r", 0.2)))
    given, better = (talked(str(r), rewards=(Reward("r", r),)) for r in (0.3, 0.5))
    silent = replace(given, messages=MESSAGES[:2], steps=(), trajectories=(), rewards=(Reward("r", 0.0),))
    assert not [*LINES["preferences"]([summed, given, silent])]
    (pair,) = LINES["preferences"]([silent, given, better])
    assert (pair["chosen_id"], pair["rejected_id"]) == ("0.5", "0.3")


def test_preferences_pair_no_two_tasks_of_an_evaluation() -> None:
    def sample(id: str, reward: float, task: int) -> Episode:
        return talked(id, group_id="eval-00000-sampled", task={"n": task}, rewards=(Reward("r", reward),))

    episodes = [sample("a", 1.0, 0), sample("b", 0.0, 1), sample("c", 0.5, 1)]  # opened alike
    assert [(pair["chosen_id"], pair["rejected_id"]) for pair in LINES["preferences"](episodes)] == [("c", "b")]


def test_atif_holds_a_turns_ids_and_what_harbor_checks() -> None:
    trajectory = sampled([11, 12], at=0, prompt=[1, 2, 3])
    (row,) = LINES["atif"]([talked(trajectories=(trajectory,))])
    steps: Any = row["steps"]
    assert [s["step_id"] for s in steps] == [1, 2, 3, 4]
    assert [s["source"] for s in steps] == ["system", "user", "agent", "agent"]
    assert steps[2]["metrics"] == {
        **{"prompt_tokens": 3, "completion_tokens": 2},
        **{"completion_token_ids": [11, 12], "logprobs": [-0.5, -0.5]},
    }
    ids = {call["tool_call_id"] for call in steps[2]["tool_calls"]}
    assert {result["source_call_id"] for result in steps[2]["observation"]["results"]} == ids
    assert steps[2]["extra"]["tool_errors"] == {"b": "malformed"}


def test_atif_actions_in_texts_are_answered_by_the_user(tmp_path: Path) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "Fix it."}, {"type": "image"}]},
        {"step_id": 2, "source": "agent", "message": "ls", "observation": {"results": [{"content": "a.py"}]}},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"schema_version": "ATIF-v1.6", "session_id": "s", "steps": steps}))
    (found,) = import_episodes(tmp_path)
    assert [(m.role, m.content) for m in found.messages] == [
        *(("user", "Fix it.[image]"), ("assistant", "ls"), ("user", "a.py")),
    ]
    assert (found.id, found.env, found.reward) == ("s", "imported/t", None)


def test_atif_calls_without_an_id_are_told_apart(tmp_path: Path) -> None:
    calls = [{"function_name": "look"}, {"function_name": "take"}]
    row = {"schema_version": "ATIF-v1.4", "steps": [{"source": "agent", "tool_calls": calls}]}
    (tmp_path / "t.json").write_text(json.dumps(row))
    (found,) = import_episodes(tmp_path)
    assert [(call.id, call.name) for call in found.messages[0].tool_calls] == [("call_0", "look"), ("call_1", "take")]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"messages": []}', r"rows.jsonl:2: messages="),
        ('{"messages": [{"role": "robot"}]}', r"messages\[0\].role='robot'"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"messages\[0\].content=3"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', r"messages\[0\].tool_calls"),
        ('{"prompt": "hello"}', '"messages"'),
        ('{"schema_version": "ATIF-v2.0"}', "ATIF-v2.0"),
        ('{"schema_version": "ATIF-v1.2", "steps": [{"source": "robot"}]}', r"steps\[0\].source"),
        (
            '{"schema_version": "ATIF-v1.4", "steps": [{"source": "agent", "tool_calls": [{"tool_call_id": "a"}]}]}',
            r"rows.jsonl:2: steps\[0\].tool_calls\[0\].function_name=None: give the name",
        ),
        ('{"messages": [{"role": "user"}], "reward": "0.5"}', "rows.jsonl:2: reward='0.5': give a number"),
        ('{"messages": [{"role": "user"}], "reward": 1' + "0" * 400 + "}", "rows.jsonl:2: int too large"),
        (b'{"messages": [{"role": "user", "content": "\xe9"}]}', "rows.jsonl:2: not JSON: 'utf-8' codec"),
        ("{", "not JSON"),
    ],
)
def test_import_names_the_row_and_field(row: str | bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    first = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
    file.write_bytes(first + (row.encode() if isinstance(row, str) else row))
    with pytest.raises(ConfigError, match=says):
        list(import_episodes(file))


def test_import_of_lines_asks_for_their_ending(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"messages": [{"role": "user"}]}\n' * 2)
    with pytest.raises(ConfigError, match=r"Extra data.*; call a file with an object a line \.jsonl"):
        list(import_episodes(tmp_path / "rows.json"))


def test_chat_messages_hold_no_half_surrogates() -> None:
    call = read_call('{"name": "\\ud800"}', 0)
    answer = Message("tool", "?", tool_call_id=call.id, name=call.name, tool_error=ToolErrorKind.MALFORMED)
    assert call.error and call.name == "\ud800"
    json.dumps(chat_messages([Message("assistant", tool_calls=(call,)), answer]), ensure_ascii=False).encode()


@pytest.mark.parametrize("format", ["openai", "atif"])
def test_export_writes_no_number_that_json_lacks(format: str, tmp_path: Path) -> None:
    def refused(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    task = {"limit": float("inf"), "low": [float("-inf"), float("nan")]}
    call = ToolCall("a", "f", task)
    episode = talked(task=task, messages=(*MESSAGES[:2], Message("assistant", tool_calls=(call,)), *MESSAGES[3:]))
    export_episodes([episode], tmp_path / "e.jsonl", format)
    for text in ((tmp_path / "e.jsonl").read_text(), chat_messages(episode.messages)[2]["tool_calls"][0]["function"]):
        json.loads(text if isinstance(text, str) else text["arguments"], parse_constant=refused)


def test_imported_conversations_group_by_what_was_asked(tmp_path: Path) -> None:
    def row(asked: str, **more: object) -> str:
        said = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
        return json.dumps({"messages": [{"role": "user", "content": asked}, said], **more}) + "\n"

    file = tmp_path / "rows.jsonl"
    file.write_text("\ufeff" + row("a", reward=0) + row("b", reward=2) + row("a", reward=1) + row("a", group="g"))
    first, other, again, named = import_episodes(file)
    assert first.group_id == again.group_id not in (other.group_id, "") and named.group_id == "g"
    assert first.final_text == "", "an empty text is no part of another kind"
    (pair,) = preference_rows([first, other, again])
    assert (pair["chosen_id"], pair["rejected_id"]) == (again.id, first.id)


def test_export_refuses_formats_and_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'parquet'"):
        export_episodes([], tmp_path / "x", "parket")
    with pytest.raises(ConfigError, match="is there already"):
        export_episodes([], tmp_path, "openai")
    with pytest.raises(ConfigError, match="There are: openai, atif"):
        list(import_episodes(tmp_path, "sft"))


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_export_that_fails_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    shown = Message("user", parts=["What?", Image.of(np.zeros((2, 2, 3), np.uint8))])
    with pytest.raises(ConfigError, match="has no place for images"):
        export_episodes([talked("a"), talked("b", messages=(shown, *MESSAGES[2:]))], tmp_path / name, "atif")
    assert list(tmp_path.iterdir()) == []
    assert export_episodes([talked("a")], tmp_path / name, "atif") == 1
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_export_removes_what_a_killed_one_left(name: str, tmp_path: Path) -> None:
    write = f"""
import os, signal
from agent_rl.formats.writing import export_episodes
def episodes():
    yield os.kill(os.getpid(), signal.SIGKILL)
export_episodes(episodes(), {str(tmp_path / name)!r}, "atif")
"""
    assert subprocess.run([sys.executable, "-c", write], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    under_way = left.with_name(left.name.replace(f"-{name}", "-other")), tmp_path / f".exporting-{name}"
    for other in under_way:
        other.touch()
    assert export_episodes([talked("a")], tmp_path / name, "atif") == 1
    assert {*tmp_path.iterdir()} == {tmp_path / name, *under_way}


def test_readme_commands_export_and_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with EpisodeWriter(tmp_path / "runs" / "latest") as writer:
        writer.write(talked())
    export, import_ = "agent-rl export runs/latest --to sft -o sft.jsonl", "agent-rl import FILE -o episodes.jsonl"
    assert main(export.split()[1:]) == 0
    assert main(["export", "runs/latest", "--to", "openai", "-o", "FILE"]) == 0
    Path("FILE").rename("FILE.jsonl")
    assert main(import_.replace("FILE", "FILE.jsonl").split()[1:]) == 0
    assert "1 episode in episodes.jsonl" in capsys.readouterr().out


def test_import_of_more_than_a_shard_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EpisodeWriter.__init__.__kwdefaults__, "shard_bytes", 1000)
    monkeypatch.setattr(index, "SMALL", 0)
    rows = [{"messages": [{"role": "user", "content": f"{n}" * 500}]} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["import", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out" / "e.jsonl")]) == 0
    assert len(list(read_episodes(tmp_path / "out" / "e.jsonl"))) == 5
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["e.jsonl"]


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_import_of_nothing_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "rows.json", tmp_path / "out" / "e.jsonl"
    file = file if text == "[]" else file.with_suffix(".jsonl")
    file.write_text(text)
    assert main(["import", str(file), "-o", str(out)]) == 1
    assert f"{file} holds no episodes" in capsys.readouterr().err and not out.exists()


def test_import_replaces_no_pipe_but_an_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rows := tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    os.mkfifo(pipe := tmp_path / "pipe")
    assert main(["import", str(rows), "-o", str(pipe)]) == 1 and pipe.is_fifo()
    assert "pipe is a pipe or a device: name a file" in capsys.readouterr().err
    (empty := tmp_path / "empty").touch()
    assert main(["import", str(rows), "-o", str(empty)]) == 0 and len(list(read_episodes(empty))) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "pipe", "empty"}


def test_commands_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, out, back = (tmp_path / name for name in ("episodes.jsonl", "out", "back.jsonl"))
    with EpisodeWriter(stored) as writer:
        for number in range(3):
            writer.write(talked(f"e{number}", rewards=(Reward("r", float(number)),)))
    assert main(["export", str(stored), "--to", "atif", "-o", str(out), "--where", "reward>0"]) == 0
    assert len(list(out.iterdir())) == 2
    assert main(["import", str(out), "-o", str(back)]) == 0
    assert [(e.id, e.reward) for e in read_episodes(back)] == [("e1", 1.0), ("e2", 2.0)]
    assert main(["import", str(out), "-o", str(back)]) == 1
    assert main(["export", str(stored), "--to", "preferences", "-o", str(tmp_path / "none.jsonl")]) in (0, 1)
    assert main(["export", str(stored), "--to", "sft", "-o", str(tmp_path / "x"), "--where", "reward>5"]) == 1
    said = capsys.readouterr()
    assert "2 rows of 2 episodes" in said.out
    assert "has 2 episodes already" in said.err and "fits reward>5" in said.err
