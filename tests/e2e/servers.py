"""Runs on verl for tests to start, watch, kill and resume, each with all of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.runs.metrics import read_metrics
from tests.e2e.verl_cpu.settings import ENVIRONMENT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MARK = "AGENT_RL_TEST_RUN"
"""The environment variable that marks a run's processes: all of them inherit it."""
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They do nothing for the run, and take a minute to notice that it was killed."""


@dataclass(frozen=True)
class Running:
    """A run on verl."""

    process: subprocess.Popen[bytes]
    folder: Path
    """Where it was started; its own folder is `runs/latest` in it."""
    log: Path
    mark: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "latest"

    def rows(self) -> list[dict[str, Any]]:
        """The metrics that verl reported of each step: `{"step": ..., "data": ...}`."""
        steps: dict[int, dict[str, Any]] = {}
        for row in read_metrics(self.run / "metrics.jsonl"):
            if row["kind"] in ("train", "validation"):
                steps.setdefault(int(str(row["step"])), {}).update(row)
        return [{"step": step, "data": data} for step, data in sorted(steps.items())]

    def finish(self, timeout: float) -> int:
        """Wait for the end; return the exit status."""
        return self.process.wait(timeout)

    def until(self, condition: Callable[[Running], object], timeout: float) -> None:
        """Wait for a condition; fail if the run ends first."""
        deadline = time.monotonic() + timeout
        while not condition(self):
            assert self.process.poll() is None, f"it ended too early: {self.tail()}"
            assert time.monotonic() < deadline, f"not within {timeout} s: {self.tail()}"
            time.sleep(0.2)

    def processes(self) -> dict[int, str]:
        """The command lines of its live processes, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (OSError, UnicodeDecodeError):
                continue
        return {pid: command for pid, command in found.items() if command}  # a zombie has none

    def gone(self, timeout: float, *, but: tuple[str, ...] = ()) -> dict[int, str]:
        """Wait until only processes with the prefixes `but` are left; return the others at the timeout."""
        deadline = time.monotonic() + timeout
        while left := {pid: command for pid, command in self.processes().items() if not command.startswith(but)}:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.5)
        return {}

    def kill(self) -> None:
        """End all of it, the hard way."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def begin(python: Path, folder: Path, *arguments: str, module: str = "verl_cpu.run") -> Running:
    """Start a module as a program: `verl_cpu.run`, or `agent_rl`."""
    mark = uuid.uuid4().hex
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{HERE}", MARK: mark}
    log = folder / f"log-{mark}.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Running(process, folder, log, mark)


def complete(python: Path, folder: Path, settings: dict[str, Any], timeout: float = 900) -> Running:
    """Run to a successful end."""
    return finished(begin(python, folder, json.dumps(settings)), timeout)


def finished(running: Running, timeout: float = 900) -> Running:
    """Return a run after its successful end."""
    try:
        assert running.finish(timeout) == 0, running.tail()
    finally:
        running.kill()
    return running
