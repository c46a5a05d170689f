"""`agent-rl train --dry-run`: the environment is checked on the embedded backend as on verl."""

from pathlib import Path

import pytest

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.group_sampling import check_environment
from agent_rl.cli import main

OWN = """
import agent_rl as ar

@ar.register("checked-v0", splits=("train", "eval", "dev"), tasks=lambda split, index: {"index": index})
class Checked(ar.Env):
    def __init__(self, size: int = 1):
        if size > 9:
            raise RuntimeError("no such size")
    def reset(self, task, rng): return "hi"
    def step(self, action): return ar.Step(terminated=True)
    def oracle(self): yield "hello"
"""
UNREAD = """
ar.register("unread-v0", tasks={"train": [{"n": 1}], "eval": "missing.jsonl", "none": []})(Checked)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(OWN + UNREAD)
    return str(file)


def test_dry_run_prints_the_config_only(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["env=checked-v0", "env_args.size=3", f"runs_dir={tmp_path}/runs", "steps=7"]
    assert main(["train", "--import", own, *settings, "--dry-run"]) == 0
    assert "steps: 7" in capsys.readouterr().out and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["env=checkt-v0"], "no environment 'checkt-v0'. Did you mean 'checked-v0'?"),
        (["env=checked-v0", "split=trian"], "no split 'trian'. Did you mean 'train'?"),
        (["env=checked-v0", "eval.dev_split=dve"], "no split 'dve'. Did you mean 'dev'?"),
        (["env=checked-v0", "eval.split=evl"], "no split 'evl'. Did you mean 'eval'?"),
        (["env=unread-v0"], "the task file"),
        (["env=unread-v0", "eval.split=none"], "split 'none' has no tasks; leave it out or give it some"),
        (["env=checked-v0", "env_args.siz=3"], "no argument 'siz'. Did you mean 'size'?"),
        (["env=checked-v0", "env_args.size=10"], "its constructor raises RuntimeError: no such size"),
        (["env=checked-v0", "algorithm=gigpo"], "define Checked.state_hash(self)"),
        (["env=checked-v0", "algorithm=vineppo"], "Checked.snapshot_attributes"),
        (["env=checked-v0", "renderer.name=chatmll"], "no renderer 'chatmll'. Did you mean 'chatml'?"),
    ],
)
def test_dry_run_refuses_unusable_environments(
    settings: list[str], said: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--import", own, *settings, "--dry-run"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rollout.groups", "rollout.samples", "eval.n", "eval.dev_n"])
def test_dry_run_refuses_counts_that_are_slips(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{name}=1000000000", "--dry-run"]) == 1
    assert f"{name}=1000000000: input should be less than or equal to" in capsys.readouterr().err


def test_dry_run_refuses_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--import", str(tmp_path / "gone.py"), "--dry-run"]) == 1
    assert "gone.py does not exist" in capsys.readouterr().err


def test_check_environment_closes_the_instance(own: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    file = tmp_path / "closing.py"
    close = f"    async def close(self): open({str(closed)!r}, 'w').close()\n"
    file.write_text(OWN.replace("checked-v0", "closing-v0") + close)
    config = TrainConfig.model_validate({"env": "closing-v0", "imports": [str(file)]})
    assert check_environment(config).id == "closing-v0" and closed.exists()


def test_check_environment_forgives_a_close_without_reset(own: str, tmp_path: Path) -> None:
    file = tmp_path / "unopened.py"
    file.write_text(OWN.replace("checked-v0", "unopened-at-first-v0") + "    def close(self): self.opened.close()\n")
    config = TrainConfig.model_validate({"env": "unopened-at-first-v0", "imports": [str(file)]})
    assert check_environment(config).id == "unopened-at-first-v0"


def test_doctor_asks_for_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    assert "agent-rl doctor backend=verl" in capsys.readouterr().err
