"""`agent-rl view`: filters, order and pages of a file of any size; terminals, pagers and broken pipes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent_rl.cli import main
from agent_rl.core.episode import Episode, Failure, Origin, Outcome, Reward, StepRecord, StopReason
from agent_rl.core.messages import Message
from agent_rl.errors import ConfigError, DamagedEpisodeError
from agent_rl.store.codec import dump_line
from agent_rl.store.selection import Selection, select
from agent_rl.store.where import FIELDS, INNER
from tests.doubles import example_episode

AGENT_RL = (sys.executable, "-m", "agent_rl")


def attempt(number: int, **changes: object) -> Episode:
    """An episode of training step `number`, with that much reward."""
    given = {
        "group_id": f"train-{number:05d}-000",
        "origin": Origin("train", "train", number),
        "rewards": (Reward("correct", float(number)),),
        "seconds": 10.0 - number,
    }
    return example_episode(f"train-{number:05d}-000-00", **{**given, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    failure = Failure("reset", "OSError", "the Zebra is gone")
    episodes = [
        attempt(0),
        attempt(1, env="other-v0", stop_reason=StopReason.TURNS, outcome=Outcome.TRUNCATED),
        attempt(2, stop_reason=StopReason.ERROR, outcome=Outcome.FAILED, error=failure),
        attempt(3, messages=(Message("user", 'Say "é".\nNow.'), Message("assistant", "É")), steps=()),
        example_episode(
            "eval-00004-sampled-0000", origin=Origin("eval", "eval", 4), rewards=(Reward("correct", None),)
        ),
    ]
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(b"".join(map(dump_line, episodes)))
    return path


def steps(file: Path, *where: str, **options: object) -> list[int | None]:
    return [e.origin.step for e in select(file, where=where, **options).episodes()]


def test_narrow_terminal_keeps_all_columns(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["view", str(file)]) == 0
    titles, *_ = capsys.readouterr().out.splitlines()
    assert titles.split() == ["id", "reward", "stop", "turns", "calls", "errors", "question"]
    for command in (["stats", str(file)], ["envs"]):
        assert main(command) == 0 and "\N{HORIZONTAL ELLIPSIS}" not in capsys.readouterr().out, command


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (["reward<1"], [0]),
        (["reward >= 1"], [1, 3]),
        (["reward=none"], [2, 4]),
        (["reward!=none"], [0, 1, 3]),
        (["env=other-v0"], [1]),
        (["env!=other-v0", "purpose=train"], [0, 2, 3]),
        (["split=eval"], [4]),
        (["step>=3"], [3, 4]),
        (["outcome=failed"], [2]),
        (["stop=turns"], [1]),
        (["group=train-00003-000"], [3]),
        (["id=train-*"], [0, 1, 2, 3]),
        (["success=yes"], [1, 3]),
        (["success=none"], [2, 4]),
        (["turns=0"], [3]),
        (["errors>0", "seconds<10"], [1, 2, 4]),
    ],
)
def test_select_keeps_what_fits(file: Path, where: list[str], found: list[int]) -> None:
    assert steps(file, *where) == found


def test_select_sorts_with_unknown_values_last(file: Path) -> None:
    assert steps(file, sort="reward") == [0, 1, 3, 2, 4]
    assert steps(file, sort="reward", reverse=True) == [3, 1, 0, 2, 4]
    assert steps(file, sort="id")[0] == 4
    assert steps(file, reverse=True) == [4, 3, 2, 1, 0]
    assert steps(file, reverse=True, limit=2, offset=1) == [3, 2]


@pytest.mark.parametrize(
    ("text", "found"), [("ZEBRA", [2]), ('say "é"', [3]), ("é", [3]), ("now.", [3]), ("base64", [])]
)
def test_select_searches_what_was_said(file: Path, text: str, found: list[int]) -> None:
    assert [step for step in steps(file, search=text) if text != "é" or step == 3] == found


def test_select_does_not_search_token_ids(file: Path) -> None:
    assert b'"trajectories"' in file.read_bytes()
    assert steps(file, search="trajectories") == []


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("reward", "is no condition"),
        ("rewrd<1", "Did you mean 'reward'"),
        ("reward<low", "reward is a number, or none"),
        ("reward<none", "= and != have"),
        ("env<shop", "= and != have"),
        ("stop=turn", "Did you mean 'turns'"),
    ],
)
def test_select_refuses_a_condition_without_meaning(file: Path, where: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select(file, where=[where])
    with pytest.raises(ConfigError, match="Did you mean 'reward'"):
        select(file, sort="rewards")


def test_heads_name_a_damaged_line(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b'{"schema":2,"id":"x","reward":1}\n')
    with pytest.raises(DamagedEpisodeError, match=r"episodes\.jsonl:6: the field 'env' is missing"):
        select(file)


def test_select_holds_one_line_at_a_time(tmp_path: Path) -> None:
    line = dump_line(replace(example_episode("ID"), steps=(StepRecord(0, 0.0, True, False, "x" * 20_000),)))
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(b"".join(line.replace(b'"ID"', b'"%d"' % n) for n in range(2000)))
    tracemalloc.start()
    assert len(select(file, where=["reward<1"], sort="seconds", search="chair").places) == 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.stat().st_size > 40e6 and peak < 4e6


def test_view_prints_a_table_and_the_command_for_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(file), "--limit", "2", "--where", "purpose=train"]) == 0
    out = capsys.readouterr().out
    assert "1 to 2 of 4 that fit, of 5 episodes; more: --offset 2\n" in out
    assert out.endswith(f"One in full: agent-rl view {file} train-00000-000-00\n")
    assert main(out.split("agent-rl ")[-1].split()) == 0
    assert "What does" in capsys.readouterr().out
    assert main(["view", str(file), "--offset", "9"]) == 0 and "none of 5 episodes" in capsys.readouterr().out


def test_view_prints_the_only_episode_that_fits(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(file), "--where", "outcome=failed", "--tokens"]) == 0
    out = capsys.readouterr().out
    assert "failed in reset: OSError: the Zebra is gone" in out and "⟦10⟨-0.50⟩ 11⟨-0.06⟩⟧" in out
    assert main(["view", str(file), "--where", "step>7"]) == 1
    assert "none of its 5 episodes fits" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["view RUN", "view RUN --html page.html", "export RUN --to openai -o rows.jsonl"])
def test_run_without_episodes_says_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "episodes.jsonl").touch()
    assert main(command.replace("RUN", str(tmp_path)).split()) == 1
    assert capsys.readouterr().err == f"agent-rl: {tmp_path}: it has no episodes yet\n"


def test_episodes_lists_counts_and_prints_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["episodes", str(file), "--where", "purpose = train and not stop = turns"]
    assert main([*train, "--sort", "seconds", "--limit", "2"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["id", "reward", "stop", "turns", "calls", "errors", "seconds", "question"]
    assert table[1].split()[:7] == ["train-00003-000-00", "3", "done", "0", "0", "0", "7"]
    assert table[3:] == [
        "1 to 2 of 3 that fit, of 5 episodes; more: --offset 2",
        f"One in full: agent-rl view {file} train-00003-000-00",
    ]
    assert main([*train, "--count"]) == 0 and capsys.readouterr().out == "3\n"
    assert main([*train, "--json", "--sort", "step"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["success"], row["error"]) for row in rows] == [
        *((0, False, None), (2, None, "OSError"), (3, True, None)),
    ]
    assert set(rows[0]) == {*FIELDS, *INNER, "tool_errors"} and rows[0]["rewards"] == {"correct": 0.0}
    for option, printed in (("--json", ""), ("--count", "0\n")):
        assert main([*train, "--where", "step>7", option]) == 0 and capsys.readouterr().out == printed
    assert main([*train, "--where", "step>7"]) == 1 and "none of its 5 episodes fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("view episodes.jsonl --limit 500", ""),
        ("envs", ""),
        ("rollout n=2 policy=oracle floors=false out=new.jsonl", "the output can't be written any more"),
    ],
)
def test_commands_end_quietly_on_a_broken_pipe(words: str, says: str, file: Path) -> None:
    file.write_bytes(b"".join(dump_line(attempt(n)) for n in range(500)))
    command, pipe = [*AGENT_RL, *words.split()], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=file.parent) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        said = running.stderr.read()
    assert (running.returncode, len(said.splitlines())) == (141, bool(says)) and said.startswith(says)
    assert (file.parent / "new.results.json").exists() == bool(says), "the work goes on"


def seen_on_a_terminal(command: Sequence[str], **variables: str) -> str:
    """What a command shows on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", **variables}
    ):
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 65536):
                seen += part
        except OSError:  # Linux's way to say that the other side is closed
            pass
    os.close(ours)
    return seen.decode()


def test_view_pages_on_a_terminal(file: Path) -> None:
    seen = seen_on_a_terminal([*AGENT_RL, "view", str(file)], PAGER="sed s/^/paged:/", COLUMNS="80")
    assert "paged:" in seen and "eval-00004-sampled-0000" in seen


def test_page_says_that_offset_leaves_none(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(file), "--html", str(file.parent / "page.html"), "--offset", "9"]) == 1
    assert "5 of its 5 episodes fit, and limit and offset leave none" in capsys.readouterr().err


@pytest.mark.parametrize(("fitting", "said"), [(0, "none of its 1 episode fits"), (1, "1 of its 1 episode fits")])
def test_selection_of_one_episode_is_in_the_singular(fitting: int, said: str) -> None:
    assert Selection("episodes.jsonl", (), (), fitting, 1).none.startswith(said)


def test_view_refuses_a_folder_for_its_page(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(file), "--html", "."]) == 1
    assert "name a file for the page, such as page.html" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["view", "run", "--serve"], ["serve", "calculator-v0"]])
@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_port_argument_is_bounded(command: list[str], port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--port", port])
    assert f"'{port}' is no port: there are 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["-1", "x", "1.5"])
def test_count_argument_is_a_whole_number(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["view", "run", "--limit", count])
    assert f"argument --limit: '{count}' is no whole number from 0 on" in capsys.readouterr().err


def test_view_refuses_a_turn_behind_the_last(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(file), "train-00000", "--turn", "1"]) == 0
    assert main(["view", str(file), "train-00000", "--turn", "99"]) == 1
    assert "there is no turn 99: the last of this episode is 1, the first 0" in capsys.readouterr().err
