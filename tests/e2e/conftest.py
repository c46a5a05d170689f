"""The end-to-end tests: what they need, and a loud word where it is missing; on CI a missing piece is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_missing: list[str] = []


def missing(reason: str) -> None:
    """Skip for want of something, and say so at the end; on CI, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    _missing.append(reason)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in dict.fromkeys(_missing):
        terminalreporter.write_line(f"NOT RUN: {reason}", yellow=True)


@pytest.fixture(scope="session")
def verl_python() -> Path:
    """The interpreter of .venv-verl."""
    python = Path(os.environ.get("AGENT_RL_VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))
    if not python.exists():
        missing(f"the tests of the verl backend: {python} is missing; `make setup-verl` makes it")
    return python


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a warm-started model; one that AGENT_RL_WARM names is taken as it is."""
    if given := os.environ.get("AGENT_RL_WARM"):
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("warm")
    settings = ["steps=0", "threads=1", "eval.n=16", "warm_start.clone_steps=400", f"runs_dir={folder}"]
    subprocess.run([sys.executable, "-m", "agent_rl", "train", *settings], cwd=ROOT, check=True, capture_output=True)
    return (folder / "latest" / "checkpoint").resolve()
