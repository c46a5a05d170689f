"""Tests of the verl backend that need verl, but no server: without it they say that nothing was tested."""

from __future__ import annotations

import os
import warnings

import pytest

os.environ.update(WANDB_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1")

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, at import
        import verl
        import verl.experimental.agent_loop
        import verl.workers.utils.losses
except ImportError as error:
    verl, problem = None, f"verl can't be imported ({error}): `make test-verl` installs it and runs these tests"
    if os.environ.get("CI") and os.environ.get("AGENT_RL_REFERENCE") == "1":
        raise


def pytest_ignore_collect(collection_path: object) -> bool | None:
    """Leave out the files beside this one where verl is missing."""
    return True if verl is None and str(collection_path).endswith(".py") else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if verl is None:
        terminalreporter.write_line(f"NOT TESTED: the verl backend beside verl: {problem}", yellow=True)
