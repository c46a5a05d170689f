"""The weights that did best in the evaluations during training, which are kept beside the last ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import agent_rl as ar
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.checkpoint import best_evaluation
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.errors import CheckpointError
from agent_rl.rollout.evaluation import Rate
from agent_rl.view.progress import Progress
from tests.runs import SMALL, config, killed_run, weights

EVERY_STEP = {"eval": {**SMALL["eval"], "every": 1}}  # type: ignore[dict-item]
Weights = dict[str, torch.Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Weights]]:
    """The weights at each evaluation during training, of which the first and the second do best."""
    found: dict[int, Weights] = {}
    real = Trainer.evaluate

    def scripted(self: Trainer, *args: object) -> object:
        evaluation, episodes = real(self, *args)  # type: ignore[arg-type]
        if args[2] == "dev":
            found[self.step] = {name: value.clone() for name, value in self.actor.model.state_dict().items()}
            evaluation = replace(evaluation, success=Rate({1: 3, 2: 3}.get(self.step, 1), 4))
        return evaluation, episodes

    monkeypatch.setattr(Trainer, "evaluate", scripted)
    yield found


def are_equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_run_keeps_the_latest_of_its_best_weights(
    talker: Path, tmp_path: Path, seen: dict[int, Weights], capsys
) -> None:
    folder = start_run(config(tmp_path, start_from=str(talker), **EVERY_STEP), Progress())
    best = load_actor(folder / "best").model.state_dict()
    assert best_evaluation(folder / "best") == {"step": 2, "success": 0.75}
    assert are_equal(best, seen[2]) and not are_equal(best, seen[1]) and not are_equal(best, weights(folder))
    assert "with 75.0% of the dev tasks at step 2, are in" in " ".join(capsys.readouterr().out.split())
    assert "those with 75.0% of the dev tasks at step 2" in (folder / "report.html").read_text()
    run = ar.Run(folder)
    assert run.best == folder / "best" and ar.load(run.best).params == ar.load(folder).params
    assert ar.run("calculator-v0", run.best, n=1)
    again = start_run(config(tmp_path, steps=0, start_from=str(run.best)), Progress())
    assert are_equal(weights(again), seen[2])


@pytest.mark.sandbox
def test_resumed_run_keeps_what_was_best_before(
    talker: Path, tmp_path: Path, monkeypatch, seen: dict[int, Weights]
) -> None:
    folder = killed_run(config(tmp_path, start_from=str(talker), **EVERY_STEP), monkeypatch)
    before = best_evaluation(folder / "best")
    again = resume_run(folder, Progress(), steps=6)
    assert best_evaluation(again / "best") == before == {"step": 2, "success": 0.75}
    assert are_equal(load_actor(again / "best").model.state_dict(), seen[2])


@pytest.mark.parametrize(("before", "step"), [(0, 3), (4, 2)])
def test_last_weights_are_best_where_none_did_better(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, step: int, capsys
) -> None:
    real = Trainer.evaluate

    def scripted(self: Trainer, *args: object) -> object:
        evaluation, episodes = real(self, *args)  # type: ignore[arg-type]
        during = len(args) == 3  # the last evaluation names its sampling
        return (replace(evaluation, success=Rate(before, 4)) if during else evaluation), episodes

    monkeypatch.setattr(Trainer, "evaluate", scripted)
    settings = {"eval": {**SMALL["eval"], "dev_split": "eval"}, "steps": 3}  # type: ignore[dict-item]
    folder = start_run(config(tmp_path, start_from=str(talker), **settings), Progress())
    found = best_evaluation(folder / "best")
    assert found is not None and found["step"] == step
    assert ("did best during training" in capsys.readouterr().out) == (step == 2)


def test_run_keeps_no_best_weights_if_told_so(talker: Path, tmp_path: Path, seen: dict[int, Weights]) -> None:
    settings = {"eval": {**EVERY_STEP["eval"], "keep_best": False}}
    folder = start_run(config(tmp_path, steps=1, start_from=str(talker), **settings), Progress())
    assert seen
    assert "best weights" not in (folder / "report.html").read_text()
    with pytest.raises(CheckpointError, match="no best weights"):
        _ = ar.Run(folder).best


def test_damaged_evaluation_of_best_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text('{"step": 3')
    with pytest.raises(CheckpointError, match=r"evaluation\.json is damaged"):
        best_evaluation(tmp_path)
