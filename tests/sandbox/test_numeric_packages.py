"""numpy and matplotlib themselves, from the package index, in local sandboxes: compiled code, threads and figures."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import readable_python, skip_if_refused

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="local sandboxes need Linux"),
]
PACKAGES = tuple(f"{name}=={version(name)}" for name in ("numpy", "matplotlib"))
SOLVE = """
import numpy as np
matrix = np.random.default_rng(0).random((300, 300))
float(np.abs(np.linalg.inv(matrix) @ matrix - np.eye(300)).max()) < 1e-8
"""
DRAW = """
import matplotlib.pyplot as plt
plt.plot(np.arange(5) ** 2)
plt.title("squares")
plt.get_backend()
"""


@pytest.fixture(scope="module")
def cache() -> Iterator[None]:
    """A folder that other users can reach, for what is built."""
    with tempfile.TemporaryDirectory(prefix="agent-rl-packages-") as name, pytest.MonkeyPatch.context() as patch:
        Path(name).chmod(0o755)
        patch.setenv("XDG_CACHE_HOME", name)
        yield


@pytest.fixture(params=["jail", "landlock"])
def box(request: pytest.FixtureRequest, cache: None, runner: asyncio.Runner) -> Iterator[Sandbox]:
    python = readable_python() if request.param == "landlock" else None
    sandboxes = LocalSandboxes(require=(), tier=request.param, python=python, packages=PACKAGES)
    with skip_if_refused():
        runner.run(sandboxes.claims())
    yield runner.run(sandboxes.open(lifetime=120))
    runner.run(sandboxes.close())


def test_numpy_solves_and_matplotlib_draws(box, run):
    solved = run(box.run_python(SOLVE, timeout=60))
    assert solved.value == "True", solved
    drawn = run(box.run_python(DRAW, timeout=60))
    assert len(drawn.plots) == 1, drawn
    (plot,) = drawn.plots
    assert "Fontconfig" not in drawn.stderr, drawn
    assert drawn.value.lower() == "'agg'" and plot[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(plot[at : at + 4]) for at in (16, 20))
    assert (width, height) == (640, 480) and len(plot) > 5000


def test_numpy_cant_be_changed_inside(box, run):
    code = "import numpy, pathlib\npathlib.Path(numpy.__file__).write_text('')"
    refused = run(box.run_python(code, timeout=60))
    assert refused.error is not None and ("Read-only" in refused.error or "Permission" in refused.error)
