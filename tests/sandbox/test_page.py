"""docs/sandboxes.md: each block of it runs, with stand-ins for numpy and matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agent_rl.core.images import Image
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.sandboxes.base import Limits
from tests.pages import blocks, page
from tests.sandbox.test_packages import make_wheel
from tests.sandbox.test_plots import STAND_IN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="local sandboxes need Linux")
NUMPY = "def mean(values):\n    return sum(values) / len(values)\n"


@pytest.fixture(scope="module")
def scope() -> dict[str, Any]:
    """What the page defines, as one module."""
    found: dict[str, Any] = {"__name__": "sandboxes_page"}
    for block in blocks(page("docs/sandboxes.md"), "python"):
        exec(compile(block, "docs/sandboxes.md", "exec"), found)
    return found


@pytest.mark.sandbox
def test_page_example_imports_packages(scope, run, tmp_path: Path, monkeypatch):
    make_wheel(tmp_path, "numpy", NUMPY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert run(scope["mean"]()) == ("3.0", "4.0\n")


@pytest.mark.sandbox
def test_page_example_returns_plots(scope, run, tmp_path: Path, monkeypatch):
    tmp_path.chmod(0o755)
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "pyplot.py").write_text(f"{STAND_IN}\ndef plot(values):\n    draw()\n")
    monkeypatch.setattr("agent_rl.sandboxes.local.backend.provide", lambda *_: tmp_path)
    value, (drawn,) = run(scope["plot"]())
    assert value == "1" and Image(drawn).size == (640, 480)


@pytest.mark.sandbox
def test_page_example_speaks_with_a_server(scope, run):
    assert run(scope["serve"]()) == (b"hello", True, -9, 3, 0)


def test_page_limits_are_those_of_the_code(scope):
    own, plain = " ".join(page("docs/sandboxes.md").split()), Limits()
    bounds = f"{plain.memory >> 20} MiB of memory, {plain.processes} processes and threads"
    assert f"{bounds}, one processor, {plain.disk >> 20} MiB and {plain.files:,} files" in own
    assert plain.cpus == 1 and SandboxedEnv.lifetime == 3600
    assert scope["Roomy"].limits.memory == 2 << 30


def test_page_example_restores_snapshots(scope, run):
    assert run(scope["branches"]()) == (None, ["42", "22"])


def test_page_example_works_in_a_terminal(scope, run):
    assert run(scope["work"]()) == ("fast in src\n", -9)
