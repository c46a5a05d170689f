"""What agent_rl logs, by Python's `logging`: silent unless it is asked for."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.view.progress import Progress
from tests.doubles import play, run_dice
from tests.runs import config

STEPS = 2


def logged(caplog: pytest.LogCaptureFixture, level: int, part: str) -> list[str]:
    """Return the messages of a level that the modules of a part logged."""
    of_part = (r for r in caplog.records if r.levelno == level and r.name.startswith(f"agent_rl.{part}"))
    return [record.getMessage() for record in of_part]


def test_package_prints_no_log_by_itself() -> None:
    handlers = logging.getLogger("agent_rl").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
    assert all(isinstance(handler, logging.NullHandler) for handler in handlers)


def test_failed_episode_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    episode = run_dice(play("6"), {"break": "reset"})
    assert episode.error is not None
    (line,) = logged(caplog, logging.WARNING, "rollout")
    assert line == f"dice-v0, group {episode.group_id}: reset failed: KeyError: 'broken reset'"


def test_run_logs_steps_weights_and_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="agent_rl")
    folder = start_run(config(tmp_path, steps=STEPS, checkpoint_every=1), Progress())
    assert logged(caplog, logging.INFO, "runs") == [f"the run is in {folder}"]
    backend = logged(caplog, logging.INFO, "backends")
    assert backend[0].startswith("warm start on 64 demonstrations")
    checkpoints = [line for line in backend if line.startswith("checkpoint")]
    assert checkpoints == [f"checkpoint of step {n} written to {folder}/checkpoint" for n in range(STEPS + 1)]
    (best,) = set(backend[1:]) - set(checkpoints)
    assert re.fullmatch(rf"weights of step 2, which solved \d+\.\d%, written to {re.escape(str(folder))}/best", best)
    steps = logged(caplog, logging.DEBUG, "backends")
    assert [line.split(":")[0] for line in steps] == [f"step {n + 1}" for n in range(STEPS)]
    assert "weights of version 1 are in use, with 0 sequences open" in logged(caplog, logging.DEBUG, "engines")
    assert len(caplog.records) < 30  # nothing for a token, a turn or an episode
    caplog.clear()
    resume_run(folder, Progress(), steps=STEPS + 1)
    assert logged(caplog, logging.INFO, "backends")[0] == f"step {STEPS} restored from {folder}/checkpoint"
