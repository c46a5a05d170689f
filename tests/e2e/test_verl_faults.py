"""Faults on verl: whatever breaks, a step is completed or the run ends with the reason, in a bounded time."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from agent_rl.core.episode import Outcome, StopReason
from agent_rl.store.episodes import read_episodes
from tests.e2e.servers import Running, begin

pytestmark = pytest.mark.e2e

BOUND = 90.0
"""Seconds within which a run must have ended once it has lost a process."""


@pytest.fixture(scope="module")
def faulty(verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose environment crashes and hangs now and then, and whose vLLM is killed after two steps."""
    folder = tmp_path_factory.mktemp("faulty")
    settings = {
        "env": "faulty-v0",
        "imports": [str(Path(__file__).parent / "verl_cpu" / "faulty.py")],
        "env_args": {"counted": str(folder / "counted")},
        "start_from": str(warm),
        "steps": 1000,
        "lr": 1e-3,
        "rollout": {"groups": 4, "samples": 4, "max_tokens": 56, "context": 128, "budget": {"seconds": 5}},
        "eval": {"n": 8, "every": 0},
    }
    running = begin(verl_python, folder, json.dumps(settings))
    try:
        running.until(lambda run: len(run.rows()) > 2, timeout=500)
        vllm = [pid for pid, command in running.processes().items() if "EngineCore" in command]
        os.kill(vllm[0], signal.SIGKILL)
        killed = time.monotonic()
        status = running.finish(timeout=BOUND)
        ended = time.monotonic() - killed
        print(f"ended {ended:.0f} s after vLLM was killed")
        left = running.gone(timeout=60)
    finally:
        running.kill()
    return {"running": running, "status": status, "left": left}


def test_episodes_that_crash_or_hang_are_outcomes_and_steps_are_completed(faulty: dict[str, Any]) -> None:
    running: Running = faulty["running"]
    episodes = list(read_episodes(running.run))
    crashed = [e for e in episodes if e.error and "the display broke" in e.error.message]
    hung = [e for e in episodes if e.stop_reason is StopReason.SECONDS]
    assert crashed and hung
    assert all(e.outcome is Outcome.FAILED and e.error.where == "step" for e in crashed if e.error)
    assert all(e.outcome is Outcome.TRUNCATED and 4.9 < e.seconds < 10 for e in hung)
    first = sum(e.origin.purpose == "train" and e.origin.step == 1 for e in episodes)
    assert first == 16  # whole groups, none refilled


def test_a_run_without_vllm_ends_with_the_reason(faulty: dict[str, Any]) -> None:
    running: Running = faulty["running"]
    assert faulty["status"] == 1
    said = running.tail()
    assert "vLLM's engine has died" in said or "EngineDeadError" in said
    assert faulty["left"] == {}
