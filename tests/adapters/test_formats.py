"""Episodes as Parquet, as a folder of `datasets` and as a log of inspect_ai, read by these packages themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from inspect_ai.log import read_eval_log
from pyarrow import parquet

import agent_rl as ar
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.formats.writing import export_episodes

TOKENS = Trajectory()
TOKENS.append([1, 2, 3], Source.PROMPT, 0)
TOKENS.append_completion(Completion((10, 11), (-0.5, -0.25), FinishReason.STOP, (7, 7)), 0)
PLAYED = ar.run("calculator-v0", "demonstrator", n=3)
EPISODES = [
    replace(PLAYED[0], id="a", group_id="g", trajectories=(TOKENS,)),
    replace(PLAYED[1], id="b", group_id="g", task=PLAYED[0].task),
    replace(
        replace(PLAYED[2], id="c", group_id="g0", rewards=()),
        outcome=ar.Outcome.FAILED,
        stop_reason=ar.StopReason.ERROR,
        error=ar.Failure("step", "OSError", "gone"),
    ),
]
PICTURE = ar.Image.of(np.zeros((2, 2, 3), np.uint8))
BROKE = ar.core.messages.ToolErrorKind.EXCEPTION
MESSAGES = (ar.Message("user", parts=["what?", PICTURE]), ar.Message("tool", parts=["!", PICTURE], tool_error=BROKE))
SHOWN = replace(PLAYED[0], id="p", group_id="g1", messages=MESSAGES)


@pytest.mark.parametrize("format", ["parquet", "dataset"])
def test_tables_refuse_images(format: str, tmp_path: Path) -> None:
    with pytest.raises(ar.ConfigError, match=f"episode p of calculator-v0 shows .image: png 2x2.*--to {format} has no"):
        export_episodes([*EPISODES, SHOWN], tmp_path / "e", format)


def test_parquet_has_a_row_for_each_episode(tmp_path: Path) -> None:
    assert export_episodes(EPISODES, tmp_path / "e.parquet", "parquet") == 3
    rows = parquet.read_table(tmp_path / "e.parquet").to_pylist()
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["trajectories"][0]["input_ids"] == [1, 2, 3, 10, 11]
    assert rows[0]["trajectories"][0]["loss_mask"] == [False, False, False, True, True]
    assert rows[0]["trajectories"][0]["logprobs"][:4] == [None, None, None, -0.5]
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["name"] == "calculator"
    assert json.loads(rows[0]["task"]) == EPISODES[0].task
    assert (rows[2]["reward"], rows[2]["ending"]) == (None, "env_crash")


def test_dataset_is_what_load_from_disk_reads(tmp_path: Path) -> None:
    assert export_episodes(EPISODES, tmp_path / "d", "dataset") == 3
    found = load_from_disk(str(tmp_path / "d"))
    assert found["id"][:] == ["a", "b", "c"]
    assert found[0]["messages"][0]["content"] == PLAYED[0].messages[0].content
    assert export_episodes([], tmp_path / "none", "dataset") == 0


def test_tasks_of_an_evaluation_are_samples_of_their_own(tmp_path: Path) -> None:
    played = [replace(PLAYED[0], id=f"e{n}", group_id="eval", task={"n": n % 2}) for n in range(4)]
    assert export_episodes(played, tmp_path / "log.json", "inspect") == 4
    samples = {s.metadata["episode"]: (s.id, s.epoch) for s in read_eval_log(str(tmp_path / "log.json")).samples or []}
    assert samples == {"e0": ("eval", 1), "e1": ("e1", 1), "e2": ("eval", 2), "e3": ("e1", 2)}


def test_inspect_reads_its_log_with_groups_as_epochs(tmp_path: Path) -> None:
    for name in ("log.eval", "log.json"):
        assert export_episodes([*EPISODES, SHOWN], tmp_path / name, "inspect") == 4
        log = read_eval_log(str(tmp_path / name), resolve_attachments=True)
        samples = {(s.metadata["episode"]): s for s in log.samples or []}
        assert [(samples[name].id, samples[name].epoch) for name in "abc"] == [("g", 1), ("g", 2), ("g0", 1)]
        asked, answered = samples["p"].messages
        assert asked.content[1].image == PICTURE.url and answered.error.message == MESSAGES[1].content
        first = samples["a"]
        assert [m.role for m in first.messages] == [m.role for m in PLAYED[0].messages]
        assert first.messages[1].tool_calls[0].function == "calculator"
        assert first.scores["reward"].value == PLAYED[0].reward
        assert samples["c"].error.message == "gone"
