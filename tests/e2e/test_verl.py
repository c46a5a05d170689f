"""verl on CPU, with vLLM, Ray and the TransferQueue: a warm-started model learns, and no token is changed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from agent_rl.core.episode import Episode
from agent_rl.store.episodes import read_episodes
from tests.doubles import assert_plays_again
from tests.e2e.servers import ROOT, begin, finished
from tests.e2e.verl_cpu.settings import SETTINGS
from tests.metrics_page import COMMON, EMBEDDED, ON_VERL, undocumented

TRAIN = "agent-rl train backend=verl start_from=MODEL"
DOCTOR = "agent-rl doctor backend=verl"
"""The README's commands; the first is made to fit on two cores by `config=FILE`."""
STEPS = 12
RUN = {
    "env": "calculator-v0",
    "steps": STEPS,
    "lr": 1e-3,
    "checkpoint_every": STEPS,
    "rollout": {"groups": 8, "samples": 8, "max_tokens": 56, "context": 128},
    "eval": {"n": 128, "every": 0},
}

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def trained(
    verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """A run by the README's command: its folder and its metrics."""
    folder = tmp_path_factory.mktemp("verl")
    here = {"hardware": "none", **{f"verl.{key}": value for key, value in SETTINGS.items()}}
    (folder / "cpu.yaml").write_text(yaml.safe_dump(RUN | here))
    words = [*TRAIN.replace("MODEL", str(warm)).split()[1:], "config=cpu.yaml"]
    running = finished(begin(verl_python, folder, *words, module="agent_rl"))
    return running.run.resolve(), running.rows()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("agent-rl view runs/latest", "eval-00000-sampled-0000"),
        ("agent-rl view runs/latest --where 'step>=10' --sort errors --reverse", "1 to 20 of"),
        (f"agent-rl view runs/latest eval-{STEPS:05d}-sampled-0000 --tokens", "compute"),
    ],
)
def test_verl_run_opens_in_view(trained: tuple[Path, list[dict[str, Any]]], line: str, shown: str) -> None:
    words = [sys.executable, "-m", "agent_rl", *shlex.split(line)[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    ran = subprocess.run(words, cwd=trained[0].parents[1], env=env, check=True, capture_output=True, text=True)
    assert shown in ran.stdout


def test_doctor_names_missing_hardware(verl_python: Path, tmp_path: Path) -> None:
    running = begin(verl_python, tmp_path, *DOCTOR.split()[1:], module="agent_rl")
    try:
        assert running.finish(timeout=600) == 1, running.tail()
    finally:
        running.kill()
    assert "missing: " in running.tail() and "GPU" in running.tail(), running.tail()


def test_verl_run_raises_held_out_success(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    _, rows = trained
    (name,) = (k for k in rows[0]["data"] if k.endswith("eval/success/mean@1"))
    before, after = rows[0]["data"][name], rows[-1]["data"][name]
    print(f"success on {RUN['eval']} tasks: {before:.3f} -> {after:.3f}")
    assert after >= before + 0.15


def test_verl_run_logs_documented_metrics_only(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    _, rows = trained
    names = {name for row in rows for name in row.get("data", row)} - COMMON
    assert undocumented(names, [*EMBEDDED, *ON_VERL]) == []


def test_verl_run_starts_each_step_on_policy(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    _, rows = trained
    steps = [row["data"] for row in rows if row["step"] > 0]
    assert len(steps) == STEPS
    for data in steps:  # mu sampled with the weights of the last sync; theta is them, before its first update
        assert data["actor/agent_rl/ratio"] == pytest.approx(1.0, abs=0.02)
        assert data["actor/agent_rl/rollout_gap"] < 0.01
        assert data["training/off_policy/trajectory_staleness/max"] == 0


def test_verl_run_stores_every_training_episode(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = trained
    episodes = list(read_episodes(folder))
    training = [e for e in episodes if e.origin.purpose == "train"]
    assert len({e.id for e in episodes}) == len(episodes) and len(training) == STEPS * 8 * 8
    versions = [int(e.trajectories[0].policy_versions.max()) for e in training if e.trajectories]
    assert sorted(set(versions)) == list(range(STEPS))
    assert not [e.error for e in episodes if e.error]
    assert {len({e.group_id for e in training if e.origin.step == s}) for s in range(1, STEPS + 1)} == {8}


def test_verl_run_stores_reported_evaluations(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = trained
    evaluated: dict[str, list[Episode]] = {}
    for episode in read_episodes(folder):
        if episode.origin.purpose == "eval":
            evaluated.setdefault(episode.group_id, []).append(episode)
    assert {tag: len(found) for tag, found in evaluated.items()} == {
        f"eval-{step:05d}-sampled": 128 for step in (0, STEPS)
    }
    for found, row in zip(evaluated.values(), (rows[0], rows[-1]), strict=True):
        (name,) = (k for k in row["data"] if k.endswith("eval/success/mean@1"))
        assert float(np.mean([e.success for e in found])) == pytest.approx(row["data"][name])
    before, after = ({e.seed for e in found} for found in evaluated.values())
    assert before == after and len(before) == 128


def test_verl_run_stores_replayable_episodes(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = trained
    episodes = list(read_episodes(folder))
    whole = sum(assert_plays_again(e) for e in episodes)
    assert whole > 0.5 * len(episodes)


def test_verl_checkpoint_loads_in_the_embedded_engine(trained: tuple[Path, list[dict[str, Any]]], warm: Path) -> None:
    from safetensors.torch import load_file

    folder, _ = trained
    saved = folder / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface"
    old, new = load_file(warm / "model.safetensors"), load_file(saved / "model.safetensors")
    assert set(old) == set(new) and not torch.equal(old["model.norm.weight"], new["model.norm.weight"])


def test_verl_run_logs_metrics_of_the_docs(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    _, rows = trained
    logged = {name for row in rows for name in row["data"]}
    table = (ROOT / "docs" / "verl.md").read_text().partition("## 6.")[2].partition("With `algorithm.proximal")[0]
    named = [
        n
        for line in re.findall(r"^\| `.*", table, re.M)
        for n in re.findall(r"`([a-z_-]+/[^`]+)`", line.split(" | ")[0])
    ]
    assert len(named) >= 14
    assert {n.replace("ENV/SPLIT", "calculator-v0/eval") for n in named} <= logged
