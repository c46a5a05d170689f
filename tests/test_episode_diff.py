"""`agent-rl diff`: two episodes, to the first differing token and side by side."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from agent_rl.cli import main
from agent_rl.core.episode import Reward
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.stats.diff import first_token_difference, is_same, marked, message_rows
from agent_rl.store.codec import dump_line
from tests.doubles import example_episode


def tokens(*replies: int, source: Source = Source.ENV) -> tuple[Trajectory, ...]:
    trajectory = Trajectory()
    trajectory.append([1, 2], Source.PROMPT, 0)
    for turn, token in enumerate(replies):
        trajectory.append_completion(Completion((token,), (-0.5,), FinishReason.STOP, (3,)), turn)
        trajectory.append([9], source, turn)
    return (trajectory,)


def test_first_differing_token_has_position_and_sources() -> None:
    one, other = (example_episode(trajectories=tokens(5, last)) for last in (6, 7))
    found = first_token_difference(one, other)
    assert found is not None and (found.trajectory, found.position) == (0, 4)
    assert found.first is not None and found.second is not None
    assert (found.first.id, found.second.id, found.first.turn) == (6, 7, 1)
    assert (found.first.source, found.first.logprob, found.first.policy_version) == (Source.POLICY, -0.5, 3)
    shorter = first_token_difference(one, example_episode(trajectories=tokens(5)))
    assert shorter is not None and (shorter.position, shorter.second) == (4, None)
    masked = first_token_difference(one, example_episode(trajectories=tokens(5, 6, source=Source.TEMPLATE)))
    assert masked is not None and masked.position == 3  # the same id, written by another
    assert first_token_difference(one, one) is None
    alone = first_token_difference(one, example_episode(trajectories=()))
    assert alone is not None and alone.position == 0


def test_episodes_are_the_same_but_for_ids_and_time() -> None:
    one = example_episode()
    assert is_same(one, replace(one, id="e1", seconds=9.0, seed=4))
    assert not is_same(one, replace(one, rewards=one.rewards[:1]))
    assert not is_same(one, replace(one, messages=(*one.messages[:-1], Message("assistant", "50"))))
    renamed = replace(one.messages[2], tool_calls=(ToolCall("c9", "price", {"item": "chair"}),))
    assert all(
        row.is_same for row in message_rows(one, replace(one, messages=(*one.messages[:2], renamed, *one.messages[3:])))
    )


def test_differing_words_are_marked() -> None:
    one, other = marked("the red chair", "the blue chair")
    assert one == [("the ", False), ("red", True), (" chair", False)] and other[1] == ("blue", True)
    assert marked("abc", "xyz uvw")[0] == [("abc", True)] and marked("same", "same")[0] == [("same", False)]


def test_diff_command_shows_both_and_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = example_episode("ID", trajectories=tokens(5, 6))
    hostile = (*one.messages[:-1], Message("assistant", "50 \x1b[2J [bold]"))
    paid = (*one.rewards, Reward("step", 0.5, source="step", turn=0))
    other = replace(one, id="OTHER", trajectories=tokens(5, 7), messages=hostile, rewards=paid)
    for name, episodes in (("latest", (one, other)), ("one", (one,))):
        file = tmp_path / "runs" / name / "episodes.jsonl"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"".join(map(dump_line, episodes)))
    _, *command = shlex.split("agent-rl diff runs/latest ID OTHER")
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "first differing token: 4 of trajectory 0" in out and "log-probability -0.5, version 3" in out
    assert ["reward", "step", "none", "0.5"] in [line.split()[1:] for line in out.splitlines()]
    assert "⟦7⟧" in out and "49" in out and "[bold]" in out and "\x1b" not in out and "(the same)" in out
    assert main(["diff", "runs/latest", "ID", "--other", "runs/one"]) == 0
    assert "same: tokens, messages, rewards and end" in capsys.readouterr().out
    assert main(["diff", "runs/latest", "OTHER", "ID", "--other", "runs/one", "--full"]) == 1
    assert main(["diff", "runs/latest", "ID"]) == 1
    assert "name another one" in capsys.readouterr().err
