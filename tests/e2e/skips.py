"""Skips of end-to-end tests, reported at the end of the run."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

NOT_RUN: list[str] = []
"""The reasons so far. They are here as pytest has a copy of `conftest` of its own."""


def missing(reason: str) -> NoReturn:
    """Skip for a missing requirement, and report it at the end; on CI, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    not_run(reason)


def not_run(reason: str) -> NoReturn:
    """Skip for a requirement that CI lacks too, and report it at the end."""
    NOT_RUN.append(reason)
    pytest.skip(reason)
