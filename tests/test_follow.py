"""Following a run: new episodes of all writers, a run that begins later, and its end."""

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from agent_rl.cli import follow, main
from agent_rl.cli.follow import new_episodes, print_line
from agent_rl.core.messages import Message
from agent_rl.rollout.watch import look
from agent_rl.runs.folder import SUMMARY, status_of
from agent_rl.store.episodes import EpisodeWriter
from tests.doubles import example_episode


def ids(path: Path, *between: Callable[[], object], where: tuple[str, ...] = ()) -> list[str]:
    """Follow a run in which something happens between two looks, and which ends after that."""
    steps: Iterator[Callable[[], object]] = iter(between)
    return [e.id for e in new_episodes(path, where, lambda: next(steps)())]


def test_follow_yields_what_any_writer_adds(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, shard_bytes=4000) as own, EpisodeWriter(tmp_path, name="other") as other:
        own.write(example_episode("before"))

        def write(*ids: str) -> Callable[[], None]:
            return lambda: [own.write(example_episode(id)) for id in ids]

        def end() -> None:
            other.write(example_episode("last"))
            (tmp_path / SUMMARY).write_text("{}")

        more = [f"e{n}" for n in range(9)]  # several shards of them
        found = ids(tmp_path, write("a"), lambda: other.write(example_episode("b")), lambda: None, write(*more), end)
    assert found == ["a", "b", *more, "last"]
    assert len(list(tmp_path.glob("episodes-0*"))) > 1


def test_follow_waits_for_a_run_to_begin(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"

    def write(id: str) -> Callable[[], None]:
        def add() -> None:
            with EpisodeWriter(folder) as writer:
                writer.write(example_episode(id, origin=example_episode().origin))

        return add

    def die() -> None:
        status_of(folder).unlink()

    def begin() -> None:
        write("a")()
        look(status_of(folder), 1.0, {})

    assert ids(folder, lambda: None, begin, write("b"), die) == ["a", "b"]


def test_follow_ends_at_once_with_a_run_that_has_ended(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(example_episode("a"))
    results = tmp_path / "episodes.results.json"
    results.write_text("{}")
    assert ids(tmp_path) == []
    status = status_of(tmp_path)
    look(status, 1.0, {})  # it was resumed
    assert ids(tmp_path, status.unlink) == []


def test_follow_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    def add() -> None:
        with EpisodeWriter(tmp_path) as writer:
            for n in range(4):
                writer.write(example_episode(f"e{n}", env="shop-v0" if n % 2 else "other-v0"))
        (tmp_path / SUMMARY).write_text("{}")

    assert ids(tmp_path, add, where=("env=shop-v0", "id != e1")) == ["e3"]


def test_follow_lines_are_harmless_and_fit() -> None:
    attack = "\x1b]0;owned\x07[red]x[/red]\u202e" * 9
    episode = example_episode(attack[:30], messages=(Message("user", attack), *example_episode().messages[2:]))
    for width, terminal in ((80, True), (80, False)):
        out = io.StringIO()
        print_line(episode, Console(file=out, width=width, force_terminal=terminal, color_system=None))
        assert out.getvalue().count("\n") == 1 and not set(re.findall(r"[\x00-\x09\x0b-\x1f\u202e]", out.getvalue()))
        assert not terminal or len(out.getvalue()) <= width + 1


def test_view_follow_stops_on_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.time, "sleep", interrupted)
    assert main(["view", str(tmp_path), "--follow"]) == 0
    assert "Stopped; 0 new episodes." in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--follow", "--where", "rewrd<1"]) == 1
    assert "rewrd" in capsys.readouterr().err
