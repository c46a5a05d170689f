"""The promise of the README: a run learns, to the bar, from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def train(tmp_path: Path, *overrides: str) -> dict[str, object]:
    settings = (f"runs_dir={tmp_path}/runs", "threads=1", *overrides)  # two threads need nearly twice the CPU time
    command = [sys.executable, "-m", "agent_rl", "train", *settings]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    summary: dict[str, object] = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    ("env", "shorter"), [("calculator-v0", ()), ("search-v0", ("warm_start.clone_steps=300", "steps=40"))]
)
def test_run_reaches_the_bar(env: str, shorter: tuple[str, ...], tmp_path: Path) -> None:
    """calculator-v0 by the defaults; search-v0, which needs less, in half the time."""
    summary = train(tmp_path, f"env={env}", *shorter)
    results = summary["eval"]
    assert isinstance(results, dict) and results["n"] >= 256
    assert results["after"] - results["before"] >= 0.40
    assert results["after"] >= 0.90 and results["after_greedy"] >= 0.97
    assert results["after"] - results["before_low_temperature"] >= 0.15  # more than the noise pruned
    assert float(str(summary["peak_rss_mib"])) <= 2048


def test_shuffled_rewards_teach_nothing(warm: Path, tmp_path: Path) -> None:
    """Those of the environment do, from the same start and in fewer steps: test_verl_run_raises_held_out_success."""
    short = ("shuffle_rewards=true", "steps=30", "eval.n=256", f"start_from={warm}", "warm_start.clone_steps=0")
    results = train(tmp_path, *short)["eval"]
    assert isinstance(results, dict)
    assert results["after"] - results["before"] < 0.15
