"""verl on CPU, asked for more than a batch: greedy episodes, continuations, groups in place of dropped ones."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from agent_rl.core.episode import Episode
from agent_rl.store.episodes import read_episodes
from tests.e2e.servers import complete

RUN = {
    "env": "calculator-v0",
    "steps": 2,
    "lr": 1e-3,
    "checkpoint_every": 2,
    "eval": {"n": 8, "every": 0},
}
ROLLOUT = {"max_tokens": 56, "context": 128}
REMAX = {
    "name": "remax",
    "advantage": "over-greedy",
    "objective": "reinforce",
    "filters": ["varied-groups"],
    "refill": {"max_rounds": 3, "oversampling": 2.0},
}
VINE = {"name": "vineppo", "advantage": "state-values", "vine": {"continuations": 2, "max_episodes": 30}}

pytestmark = pytest.mark.e2e


def groups_of(folder: Path, step: int) -> dict[str, list[Episode]]:
    groups = defaultdict(list)
    for episode in read_episodes(folder):
        if episode.origin.purpose == "train" and episode.origin.step == step:
            groups[episode.group_id].append(episode)
    return groups


def steps_of(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    steps = {row["step"]: row["data"] for row in rows if row["step"] > 0}
    assert list(steps) == [1, 2]
    for data in steps.values():  # the other samples did not hold up the weights
        assert data["actor/agent_rl/ratio"] == pytest.approx(1.0, abs=0.02)
        assert data["training/off_policy/trajectory_staleness/max"] == 0
    return steps


def test_remax_and_dapo_run_on_verl(verl_python: Path, warm: Path, tmp_path: Path) -> None:
    rollout = ROLLOUT | {"groups": 8, "samples": 2}
    run = complete(verl_python, tmp_path, RUN | {"start_from": str(warm), "rollout": rollout, "algorithm": REMAX})
    rounds = []
    for step, data in steps_of(run.rows()).items():
        groups = groups_of(run.run, step)
        varied = [g for g in groups.values() if len({e.reward for e in g}) > 1]
        print(f"step {step}: {len(groups)} groups, {len(varied)} varied, {data['rollout/rounds']} rounds")
        assert all(len(g) == 2 for g in groups.values())  # dropped ones are stored, greedy episodes are not
        assert 8 * data["rollout/batch_filled"] == min(8, len(varied)) and data["rollout/kept"] == 1.0
        assert (len(groups) > 8) == (data["rollout/rounds"] > 1)
        assert 0 <= data["rollout/greedy"] <= 1.1
        # a reward below or above the greedy one's has a gradient, and one of each pair is, at the least
        assert 8 * data["rollout/batch_filled"] <= data["train/samples"] <= 16
        rounds.append(data["rollout/rounds"])
    assert max(rounds) > 1


def test_vineppo_values_states_by_continuations_on_verl(verl_python: Path, warm: Path, tmp_path: Path) -> None:
    rollout = ROLLOUT | {"groups": 4, "samples": 4}
    run = complete(verl_python, tmp_path, RUN | {"start_from": str(warm), "rollout": rollout, "algorithm": VINE})
    for step, data in steps_of(run.rows()).items():
        episodes = [e for group in groups_of(run.run, step).values() for e in group]
        assert len(episodes) == 16 and all(e.parent is None for e in episodes)  # continuations are not stored
        assert 8 <= data["vine/episodes"] <= 30 and data["vine/valued"] == data["vine/episodes"] / 2
        assert 4 <= data["vine/valued"] <= data["vine/states"] <= sum(e.turns for e in episodes)
        assert data["vine/unscored"] == data["vine/unjudged"] == 0
        assert data["train/samples"] > 0
