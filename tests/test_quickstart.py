"""examples/quickstart.ipynb and examples/sqlite_agent.py run as they are, on a smaller model."""

import ast
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tree import ROOT

import agent_rl as ar
from agent_rl.gym.registry import load_once
from tests.runs import SMALL

pytestmark = pytest.mark.filterwarnings("ignore:.*held out for it")
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
SQLITE = ROOT / "examples" / "sqlite_agent.py"


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ar.train` make a small model, here and for two steps."""
    train: Callable[..., ar.Run] = ar.train
    settings = SMALL | {"steps": 2, "runs_dir": str(tmp_path), "progress": False}
    monkeypatch.setattr(ar, "train", lambda env, **given: train(**(given | settings | {"env": env})))
    monkeypatch.chdir(tmp_path)


def run_cell(source: str, scope: dict[str, object]) -> object:
    """Run a cell as a notebook does; return what its last line is."""
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        body, last = [*body, last], None  # type: ignore[assignment]
    exec(compile(ast.Module(body, []), "<cell>", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope) if isinstance(last, ast.Expr) else None


def test_quickstart_is_stored_without_outputs() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_quickstart_runs_and_shows_its_results() -> None:
    scope: dict[str, object] = {"__name__": "quickstart"}
    shown = [run_cell("".join(cell["source"]), scope) for cell in CELLS if cell["cell_type"] == "code"]
    names = [type(value).__name__ for value in shown if hasattr(value, "_repr_html_")]
    wrong = names.pop() if names[-1] == "Episode" else None
    assert names == ["Episode", "Evaluation", "Episode", "Run", "Metrics", "Evaluation", "Trajectory"], wrong
    for value in shown:
        assert not hasattr(value, "_repr_html_") or value._repr_html_().startswith('<div class="agent-rl">')


@pytest.mark.sandbox
def test_sqlite_agent_is_short_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = SQLITE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 45
    script, last = vars(load_once(SQLITE)), ast.parse(source).body[-1]
    assert isinstance(last, ast.If)
    exec(compile(ast.Module(last.body, []), str(SQLITE), "exec"), script)
    assert "held out:" in capsys.readouterr().out
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        script["DB"].execute("delete from items")
    assert (tmp_path / "latest" / "curve.svg").read_text().startswith("<svg ")
