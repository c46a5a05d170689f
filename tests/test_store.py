"""The episode file: it loses nothing when its writer is killed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from agent_rl.core.messages import Message
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store.codec import dump_line
from agent_rl.store.episodes import (
    EpisodeWriter,
    episode_at,
    locate_episodes,
    read_episodes,
)
from agent_rl.store.selection import episode_ids, find_episode
from agent_rl.store.shards import Place, episode_file
from tests.doubles import example_episode


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run" / "episodes.jsonl"


def write(path: Path, *ids: str) -> None:
    with EpisodeWriter(path) as writer:
        for episode_id in ids:
            writer.write(example_episode(episode_id))


def ids_of(path: Path) -> list[str]:
    return [e.id for e in read_episodes(path)]


def test_writer_keeps_the_order_of_episodes(file: Path) -> None:
    write(file, "a", "b")
    write(file, "c")
    assert ids_of(file) == ids_of(file.parent) == ["a", "b", "c"]
    assert episode_ids(file) == {"a", "b", "c"}
    assert dump_line(next(read_episodes(file))) == dump_line(example_episode("a"))


def test_episode_file_takes_a_file_or_run(tmp_path: Path) -> None:
    assert episode_file(tmp_path) == episode_file(tmp_path / "episodes.jsonl") == tmp_path / "episodes.jsonl"
    assert episode_file(tmp_path / "new-run") == tmp_path / "new-run" / "episodes.jsonl"
    (tmp_path / "odd.txt").write_text("")
    assert episode_file(tmp_path / "odd.txt") == tmp_path / "odd.txt"


def test_read_episodes_names_a_missing_file(tmp_path: Path) -> None:
    assert episode_ids(tmp_path) == set()
    with pytest.raises(StoreError, match=r"no episode file .*episodes\.jsonl; give"):
        read_episodes(tmp_path)


def test_writer_repairs_a_torn_tail_anywhere(file: Path) -> None:
    write(file, "a", "b")
    kept = file.read_bytes()
    whole = kept + dump_line(example_episode("torn", messages=(Message("user", "日本"),), trajectories=()))
    assert "日".encode() in whole[len(kept) :]  # some cut falls inside a character
    inside = len(kept) + whole[len(kept) :].index("日".encode())
    for stop in {*range(len(kept) + 1, len(whole), 16), *range(inside, inside + 7), len(whole) - 1}:
        file.write_bytes(whole[:stop])
        assert ids_of(file) == ["a", "b"]
        assert episode_ids(file) == {"a", "b"}
        with pytest.warns(UserWarning, match=f"torn line of {stop - len(kept)} bytes"):
            writer = EpisodeWriter(file)
        with writer:
            writer.write(example_episode("new"))
        aside = file.with_name("episodes.jsonl.torn-1")
        assert aside.read_bytes() == whole[len(kept) : stop]
        aside.unlink()
        assert file.read_bytes() == kept + dump_line(example_episode("new"))
    assert ids_of(file) == ["a", "b", "new"]


def test_writer_sets_long_torn_tails_aside(file: Path) -> None:
    file.parent.mkdir()
    for n in (1, 2):
        file.write_bytes(b"x" * 200_000)
        with pytest.warns(UserWarning, match=f"torn-{n}$"):
            write(file, "a")
        assert file.with_name(f"episodes.jsonl.torn-{n}").stat().st_size == 200_000
        assert ids_of(file) == ["a"]


def test_full_disk_leaves_no_part_of_what_is_set_aside(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write(file, "a")
    with file.open("ab") as handle:
        handle.write(b"torn")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*episodes\.jsonl\.torn-1"):
        EpisodeWriter(file)
    assert [path.name for path in file.parent.iterdir()] == ["episodes.jsonl"] and file.read_bytes().endswith(b"torn")


def test_writer_opens_whole_files_silently(file: Path) -> None:
    write(file, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(file, "b")
    assert sorted(p.name for p in file.parent.iterdir()) == ["episodes.jsonl"]


BAD = (b"", b"not json", b"[1]", b'{"schema":1,"id":"b"}', b'{"schema":1,"id":"\xff"}', b"\xff")


@pytest.mark.parametrize("bad", BAD)
def test_read_episodes_names_the_damaged_line(file: Path, bad: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(dump_line(example_episode("a")) + bad + b"\n" + dump_line(example_episode("c")))
    episodes = read_episodes(file)
    assert next(episodes).id == "a"
    with pytest.raises(DamagedEpisodeError, match=r"episodes\.jsonl:2: "):
        next(episodes)


def test_read_episodes_names_lines_of_other_schemas(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(json.dumps({**json.loads(dump_line(example_episode())), "schema": 9}).encode() + b"\n")
    with pytest.raises(StoreError, match=r"episodes\.jsonl:1: .*schema 9"):
        next(read_episodes(file))


def test_writer_refuses_a_second_writer(file: Path) -> None:
    with EpisodeWriter(file), pytest.raises(StoreError, match=r"another writer has .*episodes\.jsonl open"):
        EpisodeWriter(file)
    with EpisodeWriter(file) as writer:
        writer.flush()
    with pytest.raises(StoreError, match="closed"):
        writer.write(example_episode())


def test_writer_keeps_lines_of_threads_apart(file: Path) -> None:
    with EpisodeWriter(file) as writer:
        threads = [
            threading.Thread(target=lambda n=n: [writer.write(example_episode(f"{n}-{k}")) for k in range(20)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ids_of(file)) == 80


def test_writer_finishes_short_writes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:100]))
    write(file, "a", "b")
    assert ids_of(file) == ["a", "b"]


def test_writer_leaves_no_half_line_on_full_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    left = [50]

    def nearly_full(fd: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: left.pop()]) + (left.append(0) or 0)

    with EpisodeWriter(file) as writer:
        writer.write(example_episode("a"))
        monkeypatch.setattr(os, "write", nearly_full)
        with pytest.raises(OSError, match="No space"):
            writer.write(example_episode("b"))
        monkeypatch.setattr(os, "write", real)
        writer.write(example_episode("c"))
    assert ids_of(file) == ["a", "c"]


def test_read_episodes_skips_repeated_ids(file: Path) -> None:
    write(file, "a", "b", "a")
    with pytest.warns(UserWarning, match=r"1 line left out for an id .*episodes\.jsonl:3"):
        assert ids_of(file) == ["a", "b"]


def test_episode_at_reads_from_its_place(file: Path) -> None:
    write(file, "a", "b")
    with file.open("ab") as handle:
        handle.write(dump_line(example_episode("a")) + dump_line(example_episode("日本")))
    with pytest.warns(UserWarning, match="for an id that is further up"):
        places = {e.id: place for place, e in locate_episodes(file)}
    assert list(places) == ["a", "b", "日本"] and places["a"] == Place("episodes-00001", 0)
    assert [episode_at(file.parent, place).id for place in places.values()] == ["a", "b", "日本"]
    for nowhere in (places["b"].offset + 1, file.stat().st_size):
        with pytest.raises(DamagedEpisodeError, match=f"no episode begins at byte {nowhere}"):
            episode_at(file, Place("episodes-00001", nowhere))


def test_find_episode_takes_ids_and_prefixes(file: Path) -> None:
    write(file, "run-1", "run-12", "walk-7")
    assert find_episode(file, "run-1").id == "run-1"  # exact goes before prefix
    assert find_episode(file.parent, "wa").id == "walk-7"
    with pytest.raises(StoreError, match=r"2 episodes of .* begin with 'run': run-1, run-12"):
        find_episode(file, "run")
    with pytest.raises(StoreError, match=r"has no episode 'walk-8'\. Did you mean 'walk-7'"):
        find_episode(file, "walk-8")
    with pytest.raises(StoreError, match="It has run-1, run-12, walk-7"):
        find_episode(file, "?")


def test_find_episode_matches_escaped_ids(file: Path) -> None:
    write(file, 'odd "\\ id', "é")
    assert episode_ids(file) == {'odd "\\ id', "é"}
    assert find_episode(file, 'odd "').id == 'odd "\\ id'


WITHOUT_POSIX = """
import sys
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"))  # as on Windows
from agent_rl.cli import main
assert main(["view", sys.argv[1]]) == 0
assert main(["envs"]) == 0
sys.exit(main(["rollout", "n=1", f"out={sys.argv[2]}"]))
"""


def test_cli_reads_episodes_without_posix(file: Path, tmp_path: Path) -> None:
    with EpisodeWriter(file) as writer:
        writer.write(example_episode("a"))
    command = [sys.executable, "-c", WITHOUT_POSIX, str(file), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "calculator-v0" in done.stdout and "chair" in done.stdout
    assert "can't be written here" in done.stderr and "WSL" in done.stderr
