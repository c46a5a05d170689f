"""The page: its data round trip, its size, its policy, and hostile text that stays inert in the file."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_rl.cli import main
from agent_rl.core.episode import Reward
from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.token_records import TokenRecord
from agent_rl.store.where import FIELDS
from agent_rl.view.page.build import FOLDER, block, digest, page_parts, save_page, script, style
from agent_rl.view.page.data import dump, episode_json, head_columns, head_row
from agent_rl.view.page.tokens import trajectory_json
from tests.doubles import example_episode

_BLOCK = re.compile(r'<script type="application/octet-stream" id="([^"]*)">([^<]*)</script>')


def blocks(text: str) -> dict[str, Any]:
    return {id: json.loads(gzip.decompress(base64.b64decode(data))) for id, data in _BLOCK.findall(text)}


def stored(folder: Path, *episodes: Any) -> Path:
    with EpisodeWriter(folder) as writer:
        for episode in episodes:
            writer.write(episode)
    return folder


def test_page_holds_chosen_episodes_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, *(example_episode(id=f"e{n}", seed=n) for n in range(4)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "x": 0.5}\n{"step": 1, "x"')
    out = tmp_path / "out" / "run.html"
    assert main(["view", str(tmp_path), "--html", str(out), "--where", "seed>=1", "--limit", "2"]) == 0
    assert "2 of 4 episodes" in capsys.readouterr().out
    held = blocks(out.read_text())
    assert list(held) == ["episode-0", "episode-1", "heads", "metrics", "run"]
    assert held["heads"]["id"] == ["e1", "e2"] and held["episode-1"]["id"] == "e2"
    assert held["metrics"] == [{"step": 0, "x": 0.5}]
    assert held["run"] | {"version": ""} == {
        "title": tmp_path.name, "shown": 2, "total": 4, "where": ["seed>=1"], "version": "",
    }  # fmt: skip


def test_page_replaces_no_pipe_and_no_link(tmp_path: Path) -> None:
    stored(tmp_path, example_episode())
    (link := tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    save_page(tmp_path, link)
    assert link.is_symlink() and blocks((tmp_path / "page.html").read_text())
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is a pipe or a device: name a file"):
        save_page(tmp_path, pipe)
    assert pipe.is_fifo()


def test_columns_are_of_equal_length() -> None:
    columns = head_columns([head_row(example_episode()), head_row(example_episode(rewards=()))])
    lists = [c for c in columns.values() if isinstance(c, list)]
    assert {len(c) for c in lists} == {2} and all(len(c) == 2 for c in columns["rewards"].values())


def test_columns_hold_all_that_a_filter_asks_but_tasks() -> None:
    row = head_row(example_episode(rewards=tuple(Reward("step", 0.25, source="step", turn=turn) for turn in (0, 1))))
    assert {*FIELDS} <= row.keys() and row["version"] == 8
    assert row["rewards"] == {"step": 0.5}


def test_policy_lets_only_own_script_run() -> None:
    text = "".join(page_parts("embedded"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and f"script-src 'sha256-{digest(script())}'" in policy[1] and "connect-src 'none'" in policy[1]
    assert f"<script>{script()}</script>" in text and f"<style>{style()}</style>" in text
    assert "</script" not in script() and "unsafe" not in policy[1] and "default-src 'none'" in policy[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script())


def test_script_defines_each_name_once() -> None:
    """A second function of a name would silently take the place of the first."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in (FOLDER / "js").glob("*.js"))
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) +([\w$]+)", source, re.MULTILINE)
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_dump_takes_what_json_lacks() -> None:
    assert dump([2**53, 2**63 - 1, True]) == b'[9007199254740992,"9223372036854775807",true]'
    assert dump({"a": [float("nan"), float("-inf")], "b": "\ud800"}) == b'{"a":["nan","-inf"],"b":"\\ud800"}'


def test_episode_json_cuts_the_conversation() -> None:
    whole: Any = episode_json(example_episode())
    assert [(t["index"], t["first"], t["reward"]) for t in whole["cut"]] == [(None, 0, None), (0, 2, 0.1), (1, 4, 1.0)]
    assert [m["role"] for t in whole["cut"] for m in t["messages"]] == [m.role for m in example_episode().messages]


def test_turns_count_what_all_contexts_sampled() -> None:
    def trajectory(fork: Fork | None, *turns: int) -> Trajectory:
        made = Trajectory(fork)
        made.append([1, 2], Source.PROMPT, turns[0])
        for turn in turns:
            made.append_completion(Completion((3,) * 4, (-0.1,) * 4, FinishReason.STOP, (0,) * 4), turn)
        return made

    contexts = trajectory(None, 0, 1), trajectory(Fork(0, 0, delegated=True), 0)
    whole: Any = episode_json(example_episode(trajectories=contexts))
    assert [turn["sampled"] for turn in whole["cut"]] == [None, (0, 2, 8), (0, 6, 4)]
    assert sum(turn["sampled"][2] for turn in whole["cut"][1:]) == whole["sampled"]
    assert [each["fork"] for each in whole["trajectories"]] == [None, [0, 0, True]]


def test_fork_shows_its_seconds_at_its_own_turns() -> None:
    forked: Any = episode_json(example_episode(parent=("e", 1), usage=(Usage("m", seconds=2.5),)))
    assert [turn["seconds"] for turn in forked["cut"]] == [None, None, 2.5]


def test_tokens_come_back_as_they_were() -> None:
    episode, records = example_episode(), [TokenRecord("e0", 0, 5, None, np.float32([-0.5, -0.0625, np.nan, -2.0]))]
    shown: Any = episode_json(episode, records, lambda ids: "".join(f"<{i}>" for i in ids))["trajectories"]
    (own,) = shown
    ids = np.array(own["ids"])[np.frombuffer(base64.b64decode(own["tokens"]), "<u2")]
    assert ids.tolist() == episode.trajectories[0].token_ids.tolist() and own["joined"] == []
    assert own["texts"] == [f"<{i}>" for i in own["ids"]] and own["experts"] is None
    logprobs = np.frombuffer(base64.b64decode(own["logprobs"]), "<f2")
    assert logprobs == pytest.approx([-0.5, -0.0625, -0.1, -2.5], rel=1e-3)
    (record,) = own["records"]
    ratios = np.exp(np.frombuffer(base64.b64decode(record["logratios"]), "<f2").astype(float))
    assert (record["step"], record["advantages"]) == (5, None)
    assert ratios == pytest.approx([1, 1, np.nan, np.exp(0.5)], rel=1e-3, nan_ok=True)


def test_texts_of_shared_characters_are_joined() -> None:
    text = "é!"
    trajectory = Trajectory()
    trajectory.append(text.encode(), Source.PROMPT, 0)
    shown: Any = trajectory_json(trajectory, (), lambda ids: bytes(ids).decode(errors="replace"))
    assert shown["joined"] == [[0, 2, "é"]]


def test_experts_are_kept_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = Trajectory()
    trajectory.append([1], Source.PROMPT, 0)
    routed = np.arange(8, dtype=np.int8).reshape(2, 2, 2)
    trajectory.append_completion(Completion((2, 3), (-0.1, -0.2), FinishReason.STOP, (0, 0), routed), 0)
    shown: Any = trajectory_json(trajectory)
    experts = np.frombuffer(base64.b64decode(shown["experts"]["packed"]), "<i2").reshape(2, 2, 2)
    assert experts.tolist() == [routed[1].tolist(), [[-1, -1], [-1, -1]]]
    monkeypatch.setattr("agent_rl.view.page.tokens.MOST_EXPERTS", 15)
    shown = trajectory_json(trajectory)
    assert shown["experts"] == {"bytes": 16} and shown["texts"] is None


def test_page_of_32k_tokens_is_small() -> None:
    """As a model's tokens are: words by Zipf's law, a quarter of them sampled, log-probabilities with noise."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + (n * k) % 26) for k in range(2, 3 + n % 6)) + " " for n in range(20_000)]
    ids = np.minimum(rng.zipf(1.3, 32_768), len(words)) - 1
    trajectory, said = Trajectory(), []
    for turn, own in enumerate(np.split(ids, 64)):
        trajectory.append(own[:384].tolist(), Source.ENV, turn)
        logprobs = tuple((-rng.exponential(0.3, 128)).tolist())
        trajectory.append_completion(
            Completion(tuple(own[384:].tolist()), logprobs, FinishReason.STOP, (turn,) * 128), turn
        )
        said.append(Message("user", "".join(words[i] for i in own)))
    sampled = trajectory.logprobs[trajectory.loss_mask]
    noisy = (sampled + rng.normal(0, 0.02, len(sampled))).astype(np.float32)
    records = [TokenRecord("e0", 0, 0, np.full(len(sampled), 0.5, np.float32), noisy)]
    episode = example_episode(messages=tuple(said), steps=(), trajectories=(trajectory,))
    data = block(episode_json(episode, records, lambda of: "".join(words[i] for i in of)))
    page = "".join(page_parts("embedded", [("episode-0", data)]))
    assert len(page.encode()) <= 300 * 1024


def test_hostile_text_is_inert_in_the_file(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- \u202e\x1b \ud800 javascript:x"
    stored(tmp_path, example_episode(evil, env=evil, group_id=evil, messages=(Message("user", evil),), steps=()))
    save_page(tmp_path, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert "alert(1)" not in text and text.count("<script") == 5 and "\u202e" not in text
    assert blocks(text)["episode-0"]["cut"][0]["messages"][0]["content"] == evil
