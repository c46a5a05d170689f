"""Requirements of the end-to-end tests: a missing one is reported in the summary, and fails on CI."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.sandboxes.docker import Engine, build_image
from agent_rl.sandboxes.docker.container import PROCESS
from tests.e2e.dockerd import Dockerd, docker_engine, is_empty, whats_missing
from tests.e2e.skips import NOT_RUN, missing

ROOT = Path(__file__).resolve().parents[2]
collect_ignore = ["tasks"]  # whose tests run in the tasks' own images


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in dict.fromkeys(NOT_RUN):
        terminalreporter.write_line(f"NOT RUN: {reason}", yellow=True)


@pytest.fixture(scope="session")
def verl_python() -> Iterator[Path]:
    """The interpreter of .venv-verl; the sockets of vLLM's processes, which are killed, go when the session ends."""
    python = Path(os.environ.get("AGENT_RL_VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))
    if not python.exists():
        missing(f"the tests of the verl backend: {python} is missing; `make setup-verl` makes it")
    short = "ar-vllm-"  # as a socket's path has to be
    with (
        tempfile.TemporaryDirectory(prefix=short, ignore_cleanup_errors=True) as sockets,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("VLLM_RPC_BASE_PATH", sockets)
        yield python


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a warm-started model; sessions that run side by side share one in the folder AGENT_RL_WARM."""
    folder = Path(os.environ.get("AGENT_RL_WARM") or tmp_path_factory.mktemp("warm")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "latest" / "checkpoint"
    settings = ["steps=0", "threads=1", "eval.n=16", "warm_start.clone_steps=400", f"runs_dir={folder}"]
    command = [sys.executable, "-m", "agent_rl", "train", *settings]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "latest" / "summary.json").exists():
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return checkpoint.resolve()


@pytest.fixture(scope="session")
def dockerd() -> Iterator[Dockerd]:
    """A Docker engine of this session's own, with the base image."""
    if reason := whats_missing():
        missing(f"the tests of the docker sandbox: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="ar-docker-"))
    try:
        with docker_engine(folder) as engine:
            build_image(Engine(engine.host))
            yield engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(dockerd: Dockerd) -> Iterator[Engine]:
    """The engine; a test that leaves a container there fails."""
    engine = Engine(dockerd.host)
    yield engine
    try:
        assert is_empty(engine), "containers are left"
    finally:
        for container in engine.labelled(PROCESS):  # the next test's are its own
            engine.remove(container)
        engine.close()
