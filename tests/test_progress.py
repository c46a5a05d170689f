"""The progress display, on a terminal and without one."""

import io
import math
import os

import pytest
from rich.console import Console

from agent_rl.view.progress import Progress, Screen, sparkline, trend

METRICS = {
    "rollout/success": 0.5,
    "rollout/reward": 0.6,
    "rollout/turns": 2.0,
    "rollout/tool_calls": 1.5,
    "rollout/tool_errors": 0.1,
    "perf/sampled_tokens_per_s": 5000.0,
}


def shown(terminal: bool) -> str:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=terminal, width=100, color_system=None)) as progress:
        progress.say("hello")
        progress.phase("cloning", 9, 10, "loss 0.5 [/x]")
        for step in range(1, 12):
            progress.train_step(step, 11, METRICS | {"rollout/success": step / 11}, "80% of 128 dev tasks")
    return out.getvalue()


def test_progress_prints_plain_lines_without_a_terminal() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert "cloning 10/10  loss 0.5 [/x]" in text
    lines = [line for line in text.splitlines() if line.lstrip().startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/11", "5/11", "10/11", "11/11"]
    assert "▲" in lines[-1] and "80% of 128 dev tasks" in lines[-1]


def test_progress_shows_pairs_without_rollouts() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=200)) as progress:
        progress.train_step(1, 2, {"train/samples": 0.0}, "")
        pairs = {"rewards/accuracies": 0.75, "rewards/margins": 1.25, "train/pairs": 4.0, "train/entropy": 0.5}
        progress.train_step(2, 2, pairs, "80% of 128 dev tasks")
    first, second = (line.strip() for line in out.getvalue().splitlines())
    assert first == "step 1/2"
    assert second.split("  ")[1:] == [
        "pairs 75.0% of 4 the right way round, margin 1.25", "entropy 0.500 nats", "held out 80% of 128 dev tasks"
    ]  # fmt: skip


def test_progress_shows_what_is_cloned_of_stored_episodes() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=200)) as progress:
        progress.train_step(1, 1, {"train/samples": 8.0, "train/loss": 1.25, "train/entropy": 0.5}, "")
    assert out.getvalue().split("  ")[2:] == ["cloned 8 rows, loss 1.250", "entropy 0.500 nats\n"]


def test_progress_redraws_on_a_terminal() -> None:
    text = shown(terminal=True)
    assert "\x1b" in text and "hello" in text and "5000 sampled tokens/s" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_goes_on_where_nobody_reads_it(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    with Progress(Screen(file=file, force_terminal=terminal)) as progress:
        progress.say("hello")
        progress.train_step(1, 2, METRICS, "")
    assert capsys.readouterr().err == (
        "the output can't be written any more ([Errno 32] Broken pipe); the work goes on without it\n"
    )
    with pytest.raises(BrokenPipeError):
        file.close()


def test_trend_and_sparkline_by_hand() -> None:
    assert trend([0.1] * 9) is None
    assert trend([math.nan] + [0.2] * 9) is None
    assert trend([0.0] * 5 + [0.2] * 5) == 0.2
    assert sparkline([0.0, 0.5, 1.0, -1.0]) == "▁▅█▁"
    assert len(sparkline([0.5] * 100, width=7)) == 7
