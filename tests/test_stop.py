"""Ctrl-C: the first stops at the next good moment, the second at once; both say how to continue."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from pathlib import Path

import pytest

from agent_rl.cli import main
from agent_rl.engines.embedded.engine import Engine
from agent_rl.runs.stop import Interrupted, Stop
from tests.runs import SMALL


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
    small = [f"{key}={json.dumps(value).replace(chr(34), '')}" for key, value in SMALL.items()]
    assert main(["train", *small, "checkpoint_every=1"]) == 130
    out, err = capfd.readouterr()
    gc.collect()
    assert out.splitlines()[-1].startswith("Stopped; continue with: agent-rl train resume=runs/")
    assert "Traceback" not in out + err and not caplog.records
