"""The environments of benchmarks/unlike: their oracles solve them, and their short cuts and demonstrations do not."""

from __future__ import annotations

import numpy as np
import pytest
from tree import ROOT

from agent_rl.gym.registry import load_once, spec
from agent_rl.gym.tasks import task_key
from agent_rl.policy import Scripted, demonstrator, oracle
from agent_rl.rollout import summarise
from tests.doubles import plays

MOST = {"compare": 0.85, "stock": 0.85, "hops": 0.2, "lock": 0.7, "belt": 0.01, "watch": 0.01}
"""What a short cut earns at most, on 60 tasks."""


def success(name: str, split: str, policy: Scripted) -> float:
    load_once(ROOT / "benchmarks" / "unlike" / f"{name}.py")
    env = spec(f"unlike/{name}-v0")
    result = summarise(plays(env, split, policy, 60))
    assert result.failed == 0
    return result.success.value


@pytest.mark.parametrize(("name", "most"), MOST.items())
def test_unlike_environments_are_solved_by_no_short_cut(name: str, most: float) -> None:
    assert success(name, "eval", oracle()) == 1
    short_cut = Scripted(lambda env, seed: env.short_cut(np.random.default_rng(seed)))
    assert success(name, "eval", short_cut) < most


@pytest.mark.parametrize("name", MOST)
def test_unlike_demonstrations_mostly_fail_on_tasks_not_evaluated(name: str) -> None:
    assert success(name, "train", demonstrator()) < 0.85
    tasks = spec(f"unlike/{name}-v0").tasks
    keys = [{task_key(tasks.get(split, i)) for i in range(100)} for split in tasks.splits]
    assert sum(map(len, keys)) == len(set().union(*keys))
