"""Faults on verl: a fault costs an episode, or ends the run with its reason in a bounded time."""

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


SETTINGS = {
    "env": "faulty-v0",
    "imports": [str(Path(__file__).parent / "verl_cpu" / "faulty.py")],
    "steps": 1000,
    "lr": 1e-3,
    "rollout": {"groups": 4, "samples": 4, "max_tokens": 56, "context": 128},
    "budget": {"seconds": 5},
    "eval": {"n": 8, "every": 0},
}


def killed(python: Path, folder: Path, warm: Path, command: str) -> dict[str, Any]:
    """Kill the process with `command` in its command line, two steps into a run."""
    settings = SETTINGS | {"env_args": {"counted": str(folder / "counted")}, "start_from": str(warm)}
    running = begin(python, folder, json.dumps(settings))
    try:
        running.until(lambda run: len(run.rows()) > 2, timeout=500)
        found = [pid for pid, line in running.processes().items() if command in line]
        os.kill(found[0], signal.SIGKILL)
        at = time.monotonic()
        status = running.finish(timeout=BOUND)
        print(f"ended {time.monotonic() - at:.0f} s after {command} was killed")
        left = running.gone(timeout=60)
    finally:
        running.kill()
    return {"running": running, "status": status, "left": left, "pid": found[0]}


@pytest.fixture(scope="module")
def faulty(verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with an environment that crashes and hangs at times; vLLM is killed after two steps."""
    return killed(verl_python, tmp_path_factory.mktemp("faulty"), warm, "EngineCore")


def test_verl_run_survives_crashed_and_hung_episodes(faulty: dict[str, Any]) -> None:
    running: Running = faulty["running"]
    episodes = list(read_episodes(running.run))
    crashed = [e for e in episodes if e.error and "the display broke" in e.error.message]
    hung = [e for e in episodes if e.stop_reason is StopReason.SECONDS]
    assert crashed and hung
    assert all(e.outcome is Outcome.FAILED and e.error.where == "step" for e in crashed if e.error)
    assert all(e.outcome is Outcome.TRUNCATED and 4.9 < e.seconds < 60 for e in hung)
    first = sum(e.origin.purpose == "train" and e.origin.step == 1 for e in episodes)
    assert first == 16  # whole groups, none refilled


def test_verl_run_without_vllm_stops_with_reason(faulty: dict[str, Any]) -> None:
    running: Running = faulty["running"]
    assert faulty["status"] == 1
    said = running.tail()
    assert "vLLM's engine has died" in said or "EngineDeadError" in said
    assert faulty["left"] == {}


def test_verl_run_names_a_dead_rollout_worker(verl_python: Path, warm: Path, tmp_path: Path) -> None:
    lost = killed(verl_python, tmp_path, warm, "ray::AgentLoopWorker")
    running: Running = lost["running"]
    assert lost["status"] == 1 and lost["left"] == {}
    fault = (running.run / "fault.txt").read_text()
    print(fault)
    assert fault.startswith("rollout worker 0, which runs episodes of faulty-v0, is dead: ")
    assert f"process {lost['pid']}" in fault and "SYSTEM_ERROR" in fault
    last = running.tail().rpartition("InfrastructureError: ")[2]
    assert last.startswith(fault)
    assert f"agent-rl train backend=verl resume={running.run.resolve()}" in last
    assert "RayError" not in last and "The above exception" not in running.tail()


def test_verl_run_stops_at_wrong_server_weights(verl_python: Path, warm: Path, tmp_path: Path) -> None:
    extension = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    settings = SETTINGS | {
        "env_args": {"counted": str(tmp_path / "counted")},
        "start_from": str(warm),
        "verl": {extension: "verl_cpu.worker.BrokenReload"},
    }
    running = begin(verl_python, tmp_path, json.dumps(settings))
    try:
        assert running.finish(timeout=500) == 1
    finally:
        running.kill()
    fault = (running.run / "fault.txt").read_text()
    print(fault)
    assert "inference server 0 does not serve the trainer's weights: over 64 fixed tokens" in fault
    assert "max_rollout_gap=0.2" in fault and fault in running.tail()
    assert [row["step"] for row in running.rows()] == [0]  # found after the first update, before the next rollout
