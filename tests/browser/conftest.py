"""Tests of the pages in a real Chromium, driven by Playwright of .venv-adapters: `make test-browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.debian import has_program

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

ASKED = os.environ.get("AGENT_RL_BROWSER") == "1"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 400, "height": 800}
INSIDE = ("data:", "blob:", "about:")
"""Addresses that no network is needed for."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files in this folder, unless they are asked for."""
    return True if not ASKED and collection_path.suffix == ".py" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ASKED:
        terminalreporter.write_line("NOT TESTED: pages in a browser: make test-browser", yellow=True)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    from playwright.sync_api import sync_playwright

    if not has_program("chromium", package="chromium"):
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip  # on CI they must run
        refuse("NOT TESTED: there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # a container's root has no sandbox of Chromium's
        launched = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page; an error in the console or a script, or a request that leaves its origin, fails the test."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    opened, problems = context.new_page(), list[str]()

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(f"console: {message.text}")

    def requested(request: Request) -> None:
        to = request.url
        if not request.is_navigation_request() and not to.startswith(INSIDE) and _origin(to) != _origin(opened.url):
            problems.append(f"request: {to}")

    opened.on("console", heard)
    opened.on("pageerror", lambda error: problems.append(f"script: {error}"))
    opened.on("request", requested)
    yield opened
    context.close()
    assert not problems, "\n".join(problems)


def _origin(url: str) -> str | None:
    """Return what may be asked for again without leaving it; nothing of a file's, as a page is one file."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.scheme in ("http", "https") else None
