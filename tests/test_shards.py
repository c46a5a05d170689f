"""Shards: many writers, rotation and compression, and what a kill leaves of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import zstandard

from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import Source, Span, Trajectory
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store.arrays import ArrayBeside
from agent_rl.store.codec import dump_line, load_line
from agent_rl.store.episodes import EpisodeWriter, episode_at, locate_episodes, read_episodes
from agent_rl.store.frames import compress_lines, open_frames
from agent_rl.store.lines import append
from agent_rl.store.selection import episode_ids, find_episode, select
from agent_rl.store.shards import Place, Shard, read_from, shards_of
from tests.doubles import example_episode
from tests.store_crashes import SHARD_BYTES, kill_writers, stored


def write(folder: Path, *ids: str, name: str = "", shard_bytes: int = SHARD_BYTES) -> None:
    with EpisodeWriter(folder, name=name, shard_bytes=shard_bytes) as writer:
        for id in ids:
            writer.write(example_episode(id))


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def ids_of(path: Path) -> list[str]:
    return [e.id for e in read_episodes(path)]


# --- many writers ---


def test_folder_has_the_episodes_of_all_writers(tmp_path: Path) -> None:
    write(tmp_path, "b1", name="b")
    write(tmp_path, "own-1")
    write(tmp_path, "a1", "a2", name="a")
    assert names(tmp_path) == ["episodes.a.jsonl", "episodes.b.jsonl", "episodes.jsonl"]
    assert ids_of(tmp_path) == ["own-1", "a1", "a2", "b1"]
    assert ids_of(tmp_path / "episodes.jsonl") == ["own-1"]
    assert episode_ids(tmp_path) == {"a1", "a2", "b1", "own-1"} == set(select(tmp_path).ids)
    assert find_episode(tmp_path, "b").id == "b1"
    write(tmp_path, "a1", name="c")
    with pytest.warns(UserWarning, match=r"1 line left out for an id .*episodes\.c\.jsonl:1"):
        assert len(ids_of(tmp_path)) == 4


@pytest.mark.parametrize("name", ["a/b", "..\\", "a b"])
def test_writer_refuses_names_of_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="use letters, digits"):
        EpisodeWriter(tmp_path, name=name)


# --- rotation ---


def test_writer_closes_large_files_as_shards(tmp_path: Path) -> None:
    write(tmp_path, *map(str, range(40)))
    found = names(tmp_path)
    assert found[0] == "episodes-00001.jsonl.zst" and found[-1] == "episodes.jsonl" and len(found) > 3
    assert ids_of(tmp_path) == ids_of(tmp_path / "episodes.jsonl") == list(map(str, range(40)))
    assert ids_of(tmp_path / found[0]) == list(map(str, range(len(ids_of(tmp_path / found[0])))))
    plain = zstandard.ZstdDecompressor().stream_reader((tmp_path / found[0]).read_bytes(), read_across_frames=True)
    assert [line for _, line in read_from(shards_of(tmp_path)[0])] == plain.read().splitlines(keepends=True)
    write(tmp_path, "more")  # the number of the open one is known again
    assert ids_of(tmp_path)[-1] == "more"


def test_places_outlive_the_closing_of_shards(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", shard_bytes=1 << 20)
    places = {e.id: place for place, e in locate_episodes(tmp_path)}
    assert places["a"] == Place("episodes-00001", 0)
    half = read_from(shards_of(tmp_path)[0])
    assert next(half)[0] == places["a"]
    write(tmp_path, "c", "d", shard_bytes=1)
    assert names(tmp_path) == ["episodes-00001.jsonl.zst", "episodes-00002.jsonl.zst", "episodes.jsonl"]
    assert [place for place, _ in half] == [places["b"]]  # begun before, and read to the end
    assert [episode_at(tmp_path, place).id for place in places.values()] == ["a", "b"]
    assert {e.id: place for place, e in locate_episodes(tmp_path)}.items() > places.items()
    with pytest.raises(DamagedEpisodeError, match=r"00001\.jsonl\.zst: no episode begins at byte 7"):
        episode_at(tmp_path, Place("episodes-00001", 7))
    with pytest.raises(StoreError, match="episodes-00009: this shard of the episodes is gone"):
        episode_at(tmp_path, Place("episodes-00009", 0))


def test_writer_finishes_what_a_kill_left(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c", shard_bytes=1)
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    line = b"".join(line for _, line in read_from(shards_of(tmp_path)[1]))
    plain, compressed = tmp_path / "episodes.jsonl.closed-00002", tmp_path / "episodes-00002.jsonl.zst"
    for is_renamed in (False, True):  # killed before and after the compressed form had its name
        plain.write_bytes(line)
        (tmp_path / "episodes-00002.jsonl.zst.tmp").write_bytes(whole[compressed.name][:20])
        if not is_renamed:
            compressed.unlink()
        assert ids_of(tmp_path) == ["a", "b", "c"]
        write(tmp_path)
        assert not plain.exists() and compressed.read_bytes() == whole[compressed.name]
    (tmp_path / "episodes.jsonl").rename(tmp_path / "episodes.jsonl.closed-00003")  # killed before the next one
    assert ids_of(tmp_path) == ids_of(tmp_path / "episodes.jsonl") == ["a", "b", "c"]
    write(tmp_path, "d")
    assert ids_of(tmp_path) == ["a", "b", "c", "d"]


def test_shards_of_finds_one_closed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", shard_bytes=1 << 20)

    def number(file: Path) -> int:
        file.rename(f"{file}.closed-00001")  # as a writer may between two looks
        return 1

    monkeypatch.setattr("agent_rl.store.shards._open_number", number)
    assert shards_of(tmp_path / "episodes.jsonl") == [Shard(tmp_path / "episodes.jsonl", 1)]


def test_writer_refuses_while_another_closes_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EpisodeWriter(tmp_path, shard_bytes=1) as writer:
        monkeypatch.setattr(writer._thread, "submit", lambda *task: None)
        for id in ("a", "b"):
            writer.write(example_episode(id))
        writer.path.unlink()  # as between the two steps of a rotation
        with pytest.raises(StoreError, match=r"another writer has .*closed-00001 open"):
            EpisodeWriter(tmp_path)
        monkeypatch.undo()
        writer._thread.submit(int).result()


def test_frames_name_damage(tmp_path: Path) -> None:
    file = tmp_path / "x.zst"
    with file.open("wb") as target:
        compress_lines([b"one\n", b"two\n"], target)
    data = file.read_bytes()
    assert open_frames(file).read() == b"one\ntwo\n"
    for changed in (data[:-3], b"", zstandard.compress(b"one\n")):
        file.write_bytes(changed)
        with pytest.raises(DamagedEpisodeError, match="has no seek table"):
            open_frames(file)
    file.write_bytes(data[:10] + bytes([data[10] ^ 1]) + data[11:])
    with pytest.raises(DamagedEpisodeError, match="frame at byte 0"):
        open_frames(file).read()


def killed_after(left: list[None], real: Callable[..., object]) -> Callable[..., object]:
    """Return a function that is interrupted when nothing is left."""

    def call(*arguments: object) -> object:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return real(*arguments)

    return call


@pytest.mark.filterwarnings("ignore:.*for an id that is further up")
@pytest.mark.parametrize("steps", range(5))
def test_cut_can_be_interrupted_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    two = len(dump_line(example_episode("a"))) + 1
    write(tmp_path, *"abcdefg", shard_bytes=two)
    place = {e.id: place for place, e in locate_episodes(tmp_path)}["d"]
    left = [None] * steps
    with monkeypatch.context() as patch, EpisodeWriter(tmp_path) as writer:
        patch.setattr(os, "ftruncate", killed_after(left, os.ftruncate))
        patch.setattr(Shard, "remove", killed_after(left, Shard.remove))
        patch.setattr("agent_rl.store.rotation.append", killed_after(left, append))
        with pytest.raises(KeyboardInterrupt) if steps < 4 else nullcontext():
            writer.cut(place)
        assert {*ids_of(tmp_path), *ids_of(tmp_path / "episodes.jsonl.undone-1")} == set("abcdefg")
    with EpisodeWriter(tmp_path) as writer:
        assert (writer.cut(place) is None) == (steps == 4)
        assert ids_of(tmp_path) == ["a", "b", "c"] and writer.position == place
    write(tmp_path, "d", "x", shard_bytes=two)
    assert ids_of(tmp_path) == ["a", "b", "c", "d", "x"]


# --- routed experts ---


def routed(id: str, first: int) -> Episode:
    experts = np.arange(first, first + 12, dtype=np.int16).reshape(2, 3, 2)
    spans = [Span(0, 3, Source.PROMPT, 0)]
    return example_episode(id, trajectories=(Trajectory.restore([5, 6, 7], spans, [], experts),))


def test_writer_keeps_experts_in_another_file(tmp_path: Path) -> None:
    for first, ids in enumerate((("a", "b"), ("c", "plain"))):
        with EpisodeWriter(tmp_path, experts=True, shard_bytes=1) as writer:
            for id in ids:
                writer.write(example_episode(id) if id == "plain" else routed(id, first))
            writer.flush()
    written = {"a": routed("a", 0), "b": routed("b", 0), "c": routed("c", 1), "plain": example_episode("plain")}
    assert [e.trajectories[0].routed_experts for e in read_episodes(tmp_path)] == [None] * 4
    for episode in read_episodes(tmp_path, experts=True):
        known, found = (e.trajectories[0].routed_experts for e in (written[episode.id], episode))
        assert (known is None and found is None) or (found.dtype == known.dtype and np.array_equal(found, known))
    place = next(place for place, e in locate_episodes(tmp_path) if e.id == "c")
    for found in (find_episode(tmp_path, "c", experts=True), episode_at(tmp_path, place, experts=True)):
        assert found.trajectories[0].routed_experts is not None
    file = tmp_path / "episodes.experts"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DamagedEpisodeError, match="the packed experts"):
        find_episode(tmp_path, "c", experts=True)
    file.unlink()
    with pytest.raises(DamagedEpisodeError, match=r"the packed experts .*No such file"):
        find_episode(tmp_path, "c", experts=True)
    line = dump_line(routed("d", 0), experts=lambda array: ArrayBeside("int16", (2, 3, 2), 0, "../secret", 0, 9))
    with pytest.raises(DamagedEpisodeError, match="is no file of the same folder"):
        load_line(line, tmp_path)


# --- crashes ---


# several folders, as the reader rereads all of one
@pytest.mark.parametrize("runs", [1, pytest.param(25, marks=pytest.mark.sandbox)])
def test_killed_writers_lose_no_episode(tmp_path: Path, runs: int) -> None:
    for seed in range(runs):
        folder = tmp_path / str(seed)
        reader = kill_writers(folder, 8, seed)
        assert not reader.faults and reader.passes > 1
        found = stored(folder)
        assert set(reader.written) <= set(found) and set(found.values()) == {1}
