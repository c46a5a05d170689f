"""A sandbox of each backend in turn, and an event loop that lasts as long as they do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Capabilities, Sandbox, Sandboxes
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import BACKENDS, DEFAULT, LIMITS, Backend, skip_if_refused

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def run(runner: asyncio.Runner) -> Run[Any]:
    return runner.run


@pytest.fixture(scope="session", params=[name for name in BACKENDS if not BACKENDS[name].elsewhere()])
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture(scope="session")
def sandboxes(backend: Backend, runner: asyncio.Runner) -> Iterator[Sandboxes]:
    made = backend.make()
    try:
        runner.run(made.capabilities())
    except SandboxError as error:
        if not backend.refused():
            raise
        pytest.skip(f"{backend.name}: the kernel refuses: {error}")
    yield made
    runner.run(made.close())


@pytest.fixture
def jails(runner: asyncio.Runner) -> Iterator[LocalSandboxes]:
    """Local sandboxes of their own."""
    made = LocalSandboxes(LIMITS, require=())
    with skip_if_refused():
        runner.run(made.capabilities())
    yield made
    runner.run(made.close())


@pytest.fixture(autouse=True)
def as_everywhere(request: pytest.FixtureRequest) -> None:
    """Skip the tests listed in `differs`, with the reason."""
    if "backend" in request.fixturenames:
        backend: Backend = request.getfixturevalue("backend")
        test = request.node.name.replace(f"[{backend.name}]", "").replace(f"[{backend.name}-", "[")
        if reason := backend.differs.get(test):
            pytest.skip(f"{backend.name}, {test}: {reason}")


@pytest.fixture
def box(sandboxes: Sandboxes, runner: asyncio.Runner, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    opened = runner.run(sandboxes.open(owner=request.node.name, lifetime=120.0))
    yield opened
    runner.run(opened.close())


@pytest.fixture(scope="session")
def capabilities(sandboxes: Sandboxes, runner: asyncio.Runner) -> Capabilities:
    return runner.run(sandboxes.capabilities())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the suites on all backends but the default: like the twins, they are left to `make test-sandbox`."""
    here = Path(__file__).parent
    for item in items:  # of all folders
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path.is_relative_to(here) and parameters.get("backend", DEFAULT) != DEFAULT:
            item.add_marker("sandbox")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report each reason of untested suites once."""
    for backend in BACKENDS.values():
        if backend.elsewhere():
            reason = f"the suites of every sandbox on {backend.name}: `pytest {backend.run_by}` runs them"
            terminalreporter.write_line(f"NOT TESTED HERE: {reason}", yellow=True)
    if "not sandbox" in terminalreporter.config.option.markexpr:
        others = ", ".join(name for name in BACKENDS if name != DEFAULT and not BACKENDS[name].elsewhere())
        reason = f"the twins of attacks, and sandboxes on {others}: `make test-sandbox` does"
        terminalreporter.write_line(f"NOT TESTED HERE: {reason}", yellow=True)
    skipped = [r for r in terminalreporter.getreports("skipped") if r.nodeid.startswith("tests/sandbox/")]
    for reason, count in Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped).items():
        terminalreporter.write_line(f"NOT TESTED: {count} of the sandboxes' tests: {reason}", yellow=True)
