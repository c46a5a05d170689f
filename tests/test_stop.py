"""Ctrl-C: the first stops at the next good moment, the second at once; both say how to continue. And SIGHUP."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import agent_rl as ar
from agent_rl.backends.embedded.checkpoint import find_checkpoint
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.cli import main
from agent_rl.core.messages import Task
from agent_rl.engines.embedded.engine import Engine
from agent_rl.runs.metrics import read_metrics
from agent_rl.runs.stop import Interrupted, Stop
from agent_rl.view.progress import Progress
from tests.runs import SMALL, config, metrics_of


def small() -> list[str]:
    return [f"{key}={json.dumps(value).replace(chr(34), '')}" for key, value in SMALL.items()]


async def interrupts_in_a_task() -> None:
    """Get Ctrl-C twice in a task that another does not wait for."""

    async def works() -> None:
        await asyncio.sleep(0)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    task = asyncio.create_task(works())
    await asyncio.sleep(60)
    await task


def test_second_interrupt_of_a_task_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    stop = Stop(print)
    stop.hint = "resume=here"
    with stop.on_signals(), pytest.raises(Interrupted, match="resume=here"):
        asyncio.run(interrupts_in_a_task())
    gc.collect()  # an exception that was never retrieved is logged here
    assert not caplog.records


def test_second_interrupt_of_training_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    real = Engine.step

    def interrupted(self: Engine) -> None:
        if self.version:  # after the first update
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        real(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *small(), "checkpoint_every=1"]) == 130
    out, err = capfd.readouterr()
    gc.collect()
    assert out.splitlines()[-1].startswith("Stopped; continue with: agent-rl train resume=runs/")
    assert "Traceback" not in out + err and not caplog.records


def test_hang_up_of_training_ends_and_saves_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = Engine.step

    def hung_up(self: Engine) -> None:
        if self.version == 1:  # in the second step
            signal.raise_signal(signal.SIGHUP)  # by the system and by the shell
        real(self)

    monkeypatch.setattr(Engine, "step", hung_up)
    assert main(["train", *small(), f"runs_dir={tmp_path}", "steps=9", "checkpoint_every=9", "eval.every=0"]) == 130
    assert "Stopped; continue with: agent-rl train resume=" in capfd.readouterr().out
    run = ar.Run(tmp_path / "latest")
    assert [row["step"] for row in run.metrics if row["kind"] == "train"] == [1, 2]
    assert torch.load(run.folder / "checkpoint" / "trainer_state.pt", weights_only=True)["step"] == 2


def interrupt_sampling(monkeypatch: pytest.MonkeyPatch, evaluation: int, times: int) -> None:
    """Let Ctrl-C come so often amid one of a run's evaluations, counted from 0."""
    real, begun = Trainer.evaluate, list[str]()

    def interrupted(self: Trainer, tasks: Sequence[Task], *args: Any) -> object:
        begun.append("")
        for _ in range(times if len(begun) == evaluation + 1 else 0):
            signal.raise_signal(signal.SIGINT)
        return real(self, tasks, *args)

    monkeypatch.setattr(Trainer, "evaluate", interrupted)


@pytest.mark.parametrize("evaluation", [1, 4])  # the second before the training, and after it
def test_interrupt_amid_evaluation_waits_for_it_alone(
    evaluation: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, start_from=str(folder / "checkpoint"), steps=1)
    whole = start_run(settings, Progress())
    interrupt_sampling(monkeypatch, evaluation, times=1)
    with pytest.raises(Interrupted, match="continue with: agent-rl train resume="):
        start_run(settings, Progress())
    stopped = (tmp_path / "runs" / "latest").resolve()
    kinds = [row["kind"] for row in read_metrics(stopped / "metrics.jsonl")]
    assert kinds == (["eval", "eval"] if evaluation == 1 else [*["eval"] * 3, "train", "eval", "eval"])
    monkeypatch.undo()
    assert metrics_of(resume_run(stopped, Progress())) == metrics_of(whole)


def test_second_interrupt_of_first_evaluation_leaves_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_sampling(monkeypatch, 0, times=2)
    with pytest.raises(Interrupted, match="continue with: agent-rl train resume="):
        start_run(config(tmp_path, start_from=str(folder / "checkpoint")), Progress())
    assert find_checkpoint(tmp_path / "runs" / "latest" / "checkpoint").exists()


def test_on_signals_leaves_an_ignored_hang_up() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop(print)
        with stop.on_signals():
            signal.raise_signal(signal.SIGHUP)
        assert not stop.is_asked and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
