"""Tests of the adapters beside the packages that they adapt, in .venv-adapters: `make test-adapters`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ASKED = os.environ.get("AGENT_RL_ADAPTERS") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files beside this one, unless they are asked for; then a package that is missing fails them."""
    return True if not ASKED and collection_path.suffix == ".py" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ASKED:
        terminalreporter.write_line("NOT TESTED: adapters beside their packages: make test-adapters", yellow=True)
