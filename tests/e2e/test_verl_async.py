"""Asynchronous training on verl: no token is older than promised, some are stale, and a killed run is resumed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import load_config
from agent_rl.core.episode import Episode
from agent_rl.store.episodes import read_episodes
from tests.e2e.servers import RAY_AGENTS, Running, begin, complete

RESUME = "agent-rl train backend=verl resume=runs/latest"
"""The command of docs/verl.md."""

pytestmark = pytest.mark.e2e

GROUPS, SAMPLES, CHECKPOINT = 4, 4, 3
RUN: dict[str, Any] = {
    "env": "calculator-v0",
    "steps": 5,
    "lr": 1e-3,
    "rollout": {"groups": GROUPS, "samples": SAMPLES, "max_tokens": 56, "context": 128},
    "eval": {"n": 8, "every": 0},
}


def training(folder: Path | str) -> list[Episode]:
    """The stored episodes of training."""
    return [e for e in read_episodes(folder) if e.origin.purpose == "train"]


def ages(run: Path) -> list[Counter[int]]:
    """Return the number of sampled tokens by age, for every step; ages come from the stored versions.

    Episodes are stored when they are trained on, a batch a step; step `s` updates version `s - 1`.
    """
    episodes = training(run)
    batch = GROUPS * SAMPLES
    assert len(episodes) % batch == 0 and len({e.id for e in episodes}) == len(episodes)
    steps = [episodes[at : at + batch] for at in range(0, len(episodes), batch)]
    return [Counter(number - v for e in step for v in versions(e)) for number, step in enumerate(steps)]


def versions(episode: Episode) -> list[int]:
    return [v for t in episode.trajectories for v in t.policy_versions[t.loss_mask].tolist()]


def reported(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    return {row["step"]: row["data"] for row in rows if "training/global_step" in row["data"]}


def tasks(run: Path) -> list[str]:
    """The numbers of the tasks that were trained on, once a group, in order; ids end with task and sample."""
    return list(dict.fromkeys(e.id.split("-")[2] for e in training(run)))


def slow(folder: Path, pause: float) -> dict[str, Any]:
    """The calculator, every other task so slow that its episodes are under way when the others have been trained on."""
    return {
        "env": "faulty-v0",
        "imports": [str(Path(__file__).parent / "verl_cpu" / "faulty.py")],
        "env_args": {"counted": str(folder / "counted"), "share": 0, "pause": pause},
    }


@pytest.fixture(scope="module")
def separate(verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Observations of a run in `separate` that was killed in its fifth or sixth step and resumed."""
    folder = tmp_path_factory.mktemp("separate")
    asynchronous = {"mode": "separate", "max_staleness": 2}
    settings = RUN | slow(folder, 4.0) | {"start_from": str(warm), "async": asynchronous, "steps": 1000}
    first = begin(verl_python, folder, json.dumps(settings | {"checkpoint_every": CHECKPOINT}))
    try:
        first.until(lambda run: CHECKPOINT + 1 in reported(run.rows()), timeout=500)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        left = first.gone(timeout=60, but=RAY_AGENTS)
        killed = {"left": left, "episodes": [e.id for e in training(first.run)], "rows": first.rows()}
        words = [*RESUME.split()[1:], f"steps={RUN['steps']}"]
        second = begin(verl_python, folder, *words, module="agent_rl")
        try:
            assert second.finish(timeout=500) == 0, second.tail()
        finally:
            second.kill()
        killed["left after a while"] = first.gone(timeout=60)
    finally:
        first.kill()
    return {"killed": killed, "resumed": second}


def test_separate_mode_bounds_token_staleness(separate: dict[str, Any]) -> None:
    found = ages(separate["resumed"].run)
    print("tokens by staleness, a step each:", [dict(sorted(step.items())) for step in found])
    assert len(found) == RUN["steps"]
    assert all(0 <= age <= 2 for step in found for age in step)
    assert any(age > 0 for step in found for age in step)
    for step, data in reported(separate["resumed"].rows()).items():  # the same is reported
        assert data["policy_version/staleness_0"] == pytest.approx(found[step - 1][0] / found[step - 1].total())


def test_separate_mode_keeps_versions_of_every_token(separate: dict[str, Any]) -> None:
    found = [versions(e) for e in training(separate["resumed"].run)]
    assert any(len(set(episode)) > 1 for episode in found)
    assert all(episode == sorted(episode) for episode in found)


def test_killed_run_leaves_no_processes(separate: dict[str, Any]) -> None:
    assert separate["killed"]["left"] == {} == separate["killed"]["left after a while"]


def test_resumed_run_records_every_step_once(separate: dict[str, Any]) -> None:
    killed, resumed = separate["killed"], separate["resumed"]
    assert [row["step"] for row in resumed.rows()] == [*range(RUN["steps"] + 1)]
    assert resumed.rows()[: CHECKPOINT + 1] == killed["rows"][: CHECKPOINT + 1]
    assert resumed.rows()[CHECKPOINT + 1] != killed["rows"][CHECKPOINT + 1]  # run again
    trained = [e.id for e in training(resumed.run)]
    done = CHECKPOINT * GROUPS * SAMPLES
    assert trained[:done] == killed["episodes"][:done]
    assert {e.id for e in training(f"{resumed.run}/episodes.jsonl.undone-1")} == set(killed["episodes"][done:])
    assert len(set(tasks(resumed.run))) == RUN["steps"] * GROUPS  # no task twice


def test_resumed_run_continues_the_optimizer(separate: dict[str, Any]) -> None:
    (file,) = (separate["resumed"].run / "checkpoints/global_step_5/actor").glob("optim*.pt")
    state = torch.load(file, weights_only=False)["state"]
    updates = sum(data["train/with_gradient"] > 0 for data in reported(separate["resumed"].rows()).values())
    assert updates >= CHECKPOINT  # a step whose groups are all alike takes none
    assert {int(parameter["step"]) for parameter in state.values()} == {updates}


@pytest.fixture(scope="module")
def one_step_off(verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Four steps of DPO, two updates each, which scores the whole batch before each of them."""
    folder = tmp_path_factory.mktemp("one-step-off")
    algorithm = load_config("backend/embedded", TrainConfig, ["algorithm=dpo"]).algorithm.model_dump(mode="json")
    own = {"async": {"mode": "one_step_off"}, "algorithm": algorithm, "updates": {"epochs": 2}, "steps": 4}
    return complete(verl_python, folder, RUN | slow(folder, 0.0) | own | {"start_from": str(warm)})


def test_one_step_off_trains_one_step_behind(one_step_off: Running) -> None:
    found = ages(one_step_off.run)
    print("tokens by staleness, a step each:", [dict(sorted(step.items())) for step in found])
    assert len(found) == 4 and set(found[0]) == {0}
    assert {age for step in found for age in step} == {0, 1}


def test_verl_scores_the_batch_before_each_update(one_step_off: Running) -> None:
    first, *more = (data for data in reported(one_step_off.rows()).values() if data.get("train/pairs"))
    # of two updates, on average: before the first of all, policy and reference are the same, and every margin is 0
    assert first["rewards/margins"] > 0 and first["train/updates"] == 2
    assert first["rewards/accuracies"] > 0.25 and any(data["actor/agent_rl/loss"] for data in more)


def test_run_end_closes_running_environments(one_step_off: Running) -> None:
    signs = Counter((one_step_off.folder / "counted").read_text())
    assert signs["+"] == signs["-"] > 4 * GROUPS * SAMPLES
