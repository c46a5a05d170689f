"""agent_rl.runs.folder.load_imports: a run's model is played with the files that the run was started with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.gym.registry import env_ids, load_once
from agent_rl.runs.folder import load_imports
from agent_rl.store.episodes import read_episodes

OWN = """\
import agent_rl as ar

ar.register("{id}", tasks=[{{"level": 1, "index": n}} for n in range(20)])(type("Own", (ar.Env,), {{
    "__module__": __name__,
    "reset": lambda self, task, rng: "compute 1+2",
    "step": lambda self, action: ar.Step(terminated=True),
}}))
"""


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A finished run that imported a file, which is named after the test's folder."""
    own, copy = tmp_path / "own.py", tmp_path / "run"
    own.write_text(OWN.format(id=env_of(tmp_path)))
    shutil.copytree(folder, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump(config | {"imports": [str(own)]}))
    return copy


def env_of(folder: Path) -> str:
    return f"own-{folder.name.replace('_', '-')}-v0"


@pytest.mark.parametrize("model", [".", "checkpoint"])
def test_rollout_loads_imports_of_its_policy(run: Path, tmp_path: Path, model: str) -> None:
    out, env = tmp_path / "out", env_of(tmp_path)
    assert main(["rollout", f"env={env}", f"policy={run / model}", "n=2", "max_tokens=4", f"out={out}"]) == 0
    assert [e.env for e in read_episodes(out)] == [env] * 2
    stored = yaml.safe_load((out / "episodes.yaml").read_text())
    assert stored["imports"] == [str(tmp_path / "own.py")]  # for resume=


@pytest.mark.parametrize("how", ["load", "run"])
def test_python_loads_imports_of_a_policy(run: Path, tmp_path: Path, how: str) -> None:
    policy = ar.load(run / "checkpoint", max_tokens=4) if how == "load" else {"name": str(run), "context": 256}
    assert ar.run(env_of(tmp_path), policy, n=1)[0].error is None


def test_file_that_is_gone_is_one_error(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").unlink()
    said = f"{run}/config.yaml imports {tmp_path}/own.py, which is not there: put it back, or write its new place into"
    for argv in (["rollout", "env=own-v0", f"policy={run}/checkpoint"], ["train", f"resume={run}", "steps=9"]):
        assert main(argv) == 1
        assert capsys.readouterr().err.startswith(f"agent-rl: {said}")
    for call in (lambda: ar.load(run), lambda: ar.run("calculator-v0", run)):
        with pytest.raises(ar.CheckpointError, match="which is not there"):
            call()


def test_given_file_replaces_one_of_its_name(run: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "own.py").rename(tmp_path / "moved" / "own.py")
    settings = [f"env={env_of(tmp_path)}", f"policy={run}", "n=1", "max_tokens=4", f"out={tmp_path}/out"]
    assert main(["rollout", "--import", str(tmp_path / "moved" / "own.py"), *settings]) == 0


def test_model_outside_of_runs_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "config.yaml").write_text("imports: [nowhere.py]")
    assert load_imports(tmp_path / "checkpoint") == load_imports(tmp_path) == load_imports("oracle") == ()


def test_run_on_verl_imports_below_its_checkpoints(run: Path, tmp_path: Path) -> None:
    model = run / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    assert load_imports(model) == (str(tmp_path / "own.py"),) and env_of(tmp_path) in env_ids()


def test_damaged_settings_are_one_error(run: Path) -> None:
    for text in ("imports: [", "[]"):
        (run / "config.yaml").write_text(text)
        with pytest.raises(ar.CheckpointError, match=r"config\.yaml is damaged"):
            load_imports(run)


def test_file_that_is_imported_already_is_not_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_already.py").write_text("import agent_rl.gym.registry as r\nown = r.load_once(__file__)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import imported_already  # type: ignore[import-not-found]

    assert load_once(tmp_path / "imported_already.py") is imported_already is imported_already.own
