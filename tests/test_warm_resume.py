"""Warm starts that were interrupted, and go on as if they had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agent_rl.backends.embedded import warm_checkpoint
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.stages import WARM
from agent_rl.backends.embedded.warm_checkpoint import WarmCheckpoint
from agent_rl.backends.embedded.warm_start import WarmStep, warm_start
from agent_rl.backends.embedded.warm_start_config import WarmStartConfig
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.errors import CheckpointError
from agent_rl.rendering import train_tokenizer
from agent_rl.runs.stop import Interrupted, Stop
from agent_rl.view.progress import Progress
from tests.runs import assert_same_run, config, metrics_of
from tests.test_stored import DPO
from tests.test_warmstart import TINY

CONFIG = WarmStartConfig.model_validate({"copy_steps": 3, "clone_steps": 4, "batch": 4, "copy_share": 0.5})


def trajectories(n: int) -> list[Trajectory]:
    found = [Trajectory() for _ in range(n)]
    for start, trajectory in enumerate(found):
        trajectory.append(range(5 + start, 14), Source.PROMPT, 0)
        trajectory.append_completion(Completion((20 + start, 9), (0.0, 0.0), FinishReason.STOP, (0, 0)), 0)
    return found


def warmed(stop_after: int | None = None, file: Path | None = None, n: int = 6) -> tuple[list[WarmStep], torch.Tensor]:
    """Warm a fresh model up; return the steps taken, as far as the warm start came, and its weights."""
    stop, steps, tokenizer = Stop(print), list[WarmStep](), train_tokenizer(["some words"], 432)
    model = make_model(TINY, len(tokenizer), 0)

    def show(step: WarmStep) -> None:
        steps.append(step)
        stop.is_asked = len(steps) == stop_after

    kept = WarmCheckpoint(file, stop) if file else None
    try:
        warm_start(model, trajectories(n), CONFIG, tokenizer=tokenizer, seed=0, on_step=show, checkpoint=kept)
    except Interrupted:
        assert stop.is_asked
    return steps, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_warm_start_goes_on_after_interruptions_in_both_phases(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "state.pt"
    steps, weights = warmed()
    pieces = [warmed(after, file) for after in (2, 1, 3, None)]  # the second ends where the gate is judged next
    assert [step for taken, _ in pieces for step in taken] == steps and len(steps) == 7
    assert torch.equal(pieces[-1][1], weights) and not torch.equal(pieces[-2][1], weights)


def test_warm_start_refuses_the_state_of_another(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "state.pt"
    warmed(1, file)
    with pytest.raises(
        CheckpointError, match=r"are not those of the warm start in '.*run': 5 of .*, not 6 of .* tokens"
    ):
        warmed(None, file, n=5)
    file.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"state.pt' is damaged, .*; start the run again"):
        warmed(None, file)


def test_run_remembers_what_latest_was_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its warm start is saved, `runs/latest` is the run itself."""
    (tmp_path / "runs" / "before").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("before")
    monkeypatch.chdir(tmp_path)
    latest = {"env": "calculator-v0", "start_from": "runs/latest", "warm_start": {"episodes": "runs/latest"}}
    for given in (latest, latest | {"episodes": "runs/latest", "algorithm": DPO}):
        settings = TrainConfig.model_validate(given)
        paths = (settings.start_from, settings.warm_start.episodes, settings.episodes)
        assert {*paths} - {None} == {str(tmp_path / "runs" / "before")}
    assert TrainConfig.model_validate({"env": "calculator-v0", "start_from": "org/model"}).start_from == "org/model"


class Ends(Progress):
    """Ends a warm start in the step `at`: by a request to stop, or by dying."""

    def __init__(self, at: tuple[str, int] | None = None, stop: Stop | None = None) -> None:
        super().__init__()
        self.at, self.stop, self.seen = at, stop, list[tuple[str, int]]()

    def phase(self, name: str, step: int, of: int, text: str) -> None:
        self.seen.append((name, step))
        if (name, step) == self.at:
            if self.stop is None:
                raise MemoryError("killed")
            self.stop.is_asked = True


@pytest.mark.sandbox
def test_run_resumes_in_its_warm_start_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"steps": 1, "eval": {"n": 4, "dev_n": 4, "every": 0}}
    whole = start_run(config(tmp_path / "whole", **changes), Progress())
    stop = Stop(print)
    with pytest.raises(Interrupted, match="continue with: agent-rl train resume="):
        start_run(config(tmp_path, **changes), Ends(("copying", 1), stop), stop)
    folder = (tmp_path / "runs" / "latest").resolve()
    monkeypatch.setattr(warm_checkpoint, "SAVE_S", 0.0)
    dying = Ends(("cloning", 7))
    with pytest.raises(MemoryError):
        resume_run(folder, dying)
    assert dying.seen == [("cloning", step) for step in range(8)]  # neither copying step is taken again
    last = Ends()
    assert resume_run(folder, last) == folder
    assert last.seen[0] == ("cloning", 7)  # what a kill cut short was not saved
    assert_same_run(folder, whole)
    assert [row for row in metrics_of(folder) if row["kind"] == "demonstrations"]
    assert not (folder / WARM).exists() and not list(folder.glob("*.new"))
