"""The index of stored episodes: a cache that agrees with the lines, whatever becomes of it and of them."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.core.episode import Episode, Failure, Outcome, Reward
from agent_rl.core.escaping import ESCAPE
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store import index, index_file, selection
from agent_rl.store.codec import dump_line, load_line
from agent_rl.store.episodes import read_episodes
from agent_rl.store.heads import Head, head_of
from agent_rl.store.index import open_index
from agent_rl.store.selection import episode_ids, find_episode, select
from agent_rl.store.where import FIELDS, quoted
from tests.doubles import example_episode


@pytest.fixture(autouse=True)
def every_index_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SMALL", 0)
    monkeypatch.setattr(index_file, "BATCH", 3)


def write(file: Path, *episodes: Episode | str) -> Path:
    with file.open("ab") as out:
        out.writelines(dump_line(e if isinstance(e, Episode) else example_episode(e)) for e in episodes)
    return file


def ids(path: Path, **asked: object) -> list[str]:
    return list(select(path, limit=99, **asked).ids)


ODD = (
    example_episode("nan", rewards=(Reward("r", float("nan")),)),
    example_episode("half \ud800", task={"k": "\udfff", "deep": [1], "inf": float("inf"), "big": 2**70, "no": False}),
    example_episode(f"escape {ESCAPE}0041", group_id="日本", seed=2**63),
    example_episode("failed", outcome=Outcome.FAILED, error=Failure("reset", "OSError", "gone"), parent=("p", 3)),
    example_episode('bare "quote" \\ ', trajectories=(), steps=(), messages=(), rewards=(), task={}),
    example_episode("steps", rewards=tuple(Reward("step", 0.5, source="step", turn=n) for n in range(2))),
    example_episode("ended", sandbox_loss=SandboxLoss(Cause.MEMORY, "too much", {"oom_kills": 1})),
)


def test_heads_agree_with_whole_episodes(tmp_path: Path) -> None:
    file = write(tmp_path / "episodes.jsonl", "plain", *ODD)
    with open_index(file) as opened:
        heads = list(opened.heads())
    assert [h.id for h in heads] == [e.id for e in read_episodes(file)]
    for head, line in zip(heads, file.read_bytes().splitlines(), strict=True):
        whole = load_line(line)
        assert head == head_of(line) == Head.of(whole)
        assert (head.reward, head.success, head.ending, head.calls) == (
            *(whole.reward, whole.success, whole.ending, whole.tool_calls),
        )
        assert (head.turns, head.group, head.tool_errors) == (whole.turns, whole.group_id, dict(whole.tool_errors))
        assert head.tokens == sum(map(len, whole.trajectories)) and head.seed == whole.seed
    assert (heads[0].sampled, heads[0].version) == (4, 8) and heads[0].question.startswith("What does the café")
    assert heads[0].task == {"question": "What does the café's red chair cost?", "answer": "49"}
    assert heads[0].rewards == {"correct": 1 / 3, "format": 0.25, "style": None} and heads[6].rewards == {"step": 1.0}
    assert set(FIELDS) < set(heads[0].__slots__)
    for odd in ODD:
        assert ids(file, where=[f"id={quoted(odd.id)}"]) == [odd.id] and find_episode(file, odd.id).id == odd.id
    assert ids(file, where=['task.k="\udfff"']) == ids(file, where=["task.no=no"]) == ["half \ud800"]


def test_index_grows_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "episodes.jsonl", *"abcdefg")
    assert ids(tmp_path) == list("abcdefg") and (tmp_path / "episodes.sqlite").exists()
    read: list[bytes] = []
    monkeypatch.setattr(index_file, "head_of", lambda line: read.append(line) or head_of(line))
    with file.open("ab") as out:
        out.write(dump_line(example_episode("torn"))[:-9])
    assert ids(tmp_path) == list("abcdefg") and read == []
    os.truncate(file, sum(map(len, file.read_bytes().splitlines(keepends=True)[:-1])))
    with open_index(tmp_path) as opened:
        write(file, *"hijk")
        opened.update()
        assert opened.total == 11 and len(read) == 4
    assert ids(file) == list("abcdefghijk") and episode_ids(file) == set("abcdefghijk") and len(read) == 4
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["episodes.jsonl", "episodes.sqlite"]


@pytest.mark.parametrize("change", ["cut", "other", "last", "deleted", "garbage", "middle", "version"])
def test_index_is_made_again(tmp_path: Path, change: str) -> None:
    file, kept = write(tmp_path / "episodes.jsonl", *"abcdefgh"), tmp_path / "episodes.sqlite"
    assert len(ids(file)) == 8
    lines = file.read_bytes().splitlines(keepends=True)
    expected = list("abcdefgh")
    if change == "cut":
        file.write_bytes(b"".join(lines[:2]))
        expected = ["a", "b"]
    elif change in ("other", "last"):
        number = 0 if change == "other" else 7
        lines[number] = lines[number].replace(b'"id":"%c"' % expected[number].encode(), b'"id":"X"')
        expected[number] = "X"
        file.write_bytes(b"".join(lines))
    elif change == "deleted":
        kept.unlink()
    elif change == "garbage":
        kept.write_bytes(b"no database at all, but long enough to look like one" * 100)
    elif change == "middle":
        held = bytearray(kept.read_bytes())
        held[4096:] = b"\xff" * (len(held) - 4096)
        kept.write_bytes(held)
    else:
        with sqlite3.connect(kept) as database:
            database.execute("PRAGMA user_version = 7")
            database.execute("CREATE TABLE another (x)")
    assert ids(file) == expected
    assert kept.exists() and len(ids(file, where=["reward>0"])) == len(expected)


def test_index_covers_every_writer_of_a_run(tmp_path: Path) -> None:
    own, other = write(tmp_path / "episodes.jsonl", "a", "b"), write(tmp_path / "episodes.w.jsonl", "c", "b")
    with pytest.warns(UserWarning, match=r"1 line left out for an id that is further up: .*\.w\.jsonl:2"):
        assert ids(tmp_path) == ["a", "b", "c"]
    assert ids(own) == ["a", "b"] and ids(other) == ["c", "b"]  # each by itself
    write(own, "d")
    with pytest.warns(UserWarning, match="for an id that is further up"):
        assert ids(tmp_path, reverse=True) == ["c", "d", "b", "a"]
    with pytest.warns(UserWarning, match="for an id that is further up"):
        assert select(tmp_path, where=["id=b"]).fitting == 1
    assert ids(write(tmp_path / "judged.jsonl", "z")) == ["z"] and (tmp_path / "judged.sqlite").exists()


def test_index_of_read_only_folders_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "episodes.jsonl", "a", "b")
    real = sqlite3.connect

    def refused(path: object, **options: object) -> sqlite3.Connection:
        if path != ":memory:":
            raise sqlite3.OperationalError("unable to open database file")
        return real(":memory:", **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(sqlite3, "connect", refused)
    assert ids(file) == ["a", "b"] and not (tmp_path / "episodes.sqlite").exists()


def test_index_names_damaged_lines_and_reads_the_rest(tmp_path: Path) -> None:
    file = write(tmp_path / "episodes.jsonl", "a")
    file.write_bytes(file.read_bytes() + b'{"schema":2,"id":"x","reward":1}\n' + dump_line(example_episode("c")))
    for asked in (select, episode_ids, lambda path: find_episode(path, "zzz")):
        with pytest.raises(DamagedEpisodeError, match=r"episodes\.jsonl:2: the field 'env' is missing"):
            asked(file)
    assert find_episode(file, "c").id == "c"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[2])
    assert ids(file) == ["a", "c"]
    file.unlink()
    with pytest.raises(StoreError, match="there is no episode file"):
        select(file)


TOGETHER = """
import sys
from agent_rl.store import index, index_file, selection
index.SMALL, index_file.BATCH = 0, 5
print(len(selection.select(sys.argv[1], where=["reward>0"], limit=10**9).ids))
"""


def test_index_is_made_by_processes_together(tmp_path: Path) -> None:
    file = write(tmp_path / "episodes.jsonl", *(f"e{n}" for n in range(200)))
    command = [sys.executable, "-c", TOGETHER, str(file)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == ["200\n"] * 3
    with sqlite3.connect(tmp_path / "episodes.sqlite") as database:
        assert database.execute("SELECT count(*), count(DISTINCT id) FROM episodes").fetchone() == (200, 200)


def test_search_reads_only_lines_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "episodes.jsonl", *"abcdefgh")
    searched: list[str] = []

    def says(line: bytes, text: str) -> bool:
        searched.append(load_line(line).id)
        return searched[-1] != "d"

    monkeypatch.setattr(selection, "_says", says)
    for near in (0, 10**6):
        monkeypatch.setattr(selection, "_NEAR", near)
        searched.clear()
        found = select(file, where=["id in (b, d, g, h)"], search="x", sort="id", reverse=True, limit=2)
        assert (found.ids, found.fitting, searched) == (["h", "g"], 3, ["b", "d", "g", "h"])


def walked(database: sqlite3.Connection, sql: str) -> Iterator[str]:
    return (row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {sql}"))


def test_index_sorts_nothing_that_is_in_order(tmp_path: Path) -> None:
    with open_index(write(tmp_path / "episodes.jsonl", "a")) as opened:
        traced: list[str] = []
        opened._database.set_trace_callback(traced.append)
        opened.places(limit=1)
        opened.find("a")
        opened.find("b")
        opened._database.set_trace_callback(None)
        plans = ["; ".join(walked(opened._database, sql)) for sql in traced]
    assert "TEMP B-TREE" not in plans[0] and all("by_id" in plan for plan in plans[1:])
