"""agent_rl.backends.verl.driver.run: what a start leaves, in front of verl itself."""

from pathlib import Path

import pytest

from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver import run as driver
from agent_rl.errors import CheckpointError, ConfigError, InfrastructureError
from agent_rl.runs.folder import WARNINGS


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerlConfig:
    """Settings beside an earlier run; the cluster has what they need."""
    runs = tmp_path / "runs"
    (runs / "before").mkdir(parents=True)
    (runs / "latest").symlink_to("before")
    monkeypatch.setattr(driver, "require_cluster", lambda config: ["the tokenizer is odd"])
    return VerlConfig.model_validate({"env": "calculator-v0", "start_from": "m", "runs_dir": str(runs), "name": "new"})


@pytest.mark.parametrize(("error", "left"), [(ConfigError, 0), (KeyboardInterrupt, 0), (InfrastructureError, 1)])
def test_start_that_fails_leaves_latest(
    error: type[BaseException], left: int, config: VerlConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that the machine failed keeps its folder, from which it continues."""

    def fail(config: VerlConfig, folder: Path) -> Path:
        assert (folder / WARNINGS).read_text() == "the tokenizer is odd\n"
        raise error("no")

    monkeypatch.setattr(driver, "run", fail)
    with pytest.raises(error):
        driver.start(config)
    runs = Path(config.runs_dir)
    assert (runs / "latest").resolve() == runs / "before" and len(list(runs.glob("*-new"))) == left


def test_check_refuses_what_no_node_could_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "compose_verl", lambda config, folder: config.start_from)

    def check(start_from: str, renderer: str | None = None) -> object:
        settings = {"env": "calculator-v0", "start_from": start_from, "renderer": {"name": renderer}}
        return driver.check_run(VerlConfig.model_validate(settings))

    for path in ("nowhere", "./nowhere"):
        with pytest.raises(CheckpointError, match=f"no model in '{path}'"):
            check(path)
    with pytest.raises(ConfigError, match=r"no renderer 'qwen33'\. Did you mean 'qwen3'"):
        check("any/model", "qwen33")
    for elsewhere in ("any/model", "/of/the/nodes", "hdfs://of/the/nodes"):
        assert check(elsewhere, "qwen3") == elsewhere
    (tmp_path / "here").mkdir()
    assert check("here") == str(tmp_path / "here")
