"""agent_rl.rollout.naming: the ids and seeds of a run's episodes."""

from typing import Any

import pytest

from agent_rl.core.episode import Origin
from agent_rl.gym.tasks import episode_seed
from agent_rl.rollout.naming import names_of, origin_of, seed_of

TASK = {"expression": "3*4"}


def row(**changes: object) -> dict[str, Any]:
    """The fields of an agent loop's row."""
    return {"split": "train", "evaluation": False, "global_steps": 3, "index": 12, "session_id": 1} | changes


def test_origin_of_reads_a_row() -> None:
    assert origin_of(row(split="hard")) == Origin("train", "hard", 3, sample=1)
    assert origin_of(row(), greedy=True) == Origin("train", "train", 3, greedy=True)
    assert origin_of(row(evaluation=True)) == Origin("eval", "train", 3, sample=1)


def test_names_of_training_episodes_count_tasks() -> None:
    assert names_of(Origin("train", "hard", 3, 1), 12, digits=7) == ("train-00003-0000012", "train-00003-0000012-01")
    assert names_of(Origin("train", "train", 3, 1), 12) == ("train-00003-012", "train-00003-012-01")
    assert names_of(Origin("train", "train", 3, greedy=True), 12)[1] == "train-00003-012-greedy"


@pytest.mark.parametrize("greedy", [False, True])
def test_names_of_evaluated_episodes_name_the_sampling(greedy: bool) -> None:
    group = f"train-00003-{'greedy' if greedy else 'sampled'}"
    assert names_of(Origin("eval", "train", 3, greedy=greedy), 12) == (group, f"{group}-0012")
    assert names_of(Origin("eval", "train", 3, 1), 12)[1] == "train-00003-sampled-0012-01"
    low = names_of(Origin("eval", "eval", 3), 12, sampling="low-temperature")
    assert low == ("eval-00003-low-temperature", "eval-00003-low-temperature-0012")


def test_seeds_depend_on_the_step_in_training_only() -> None:
    training = [seed_of(Origin("train", "train", step, s), TASK, 7) for step in (3, 4) for s in (0, 1)]
    assert len(set(training)) == 4
    assert training[0] == episode_seed(7 * 1_000_003 + 3, TASK, 0)
    assert seed_of(Origin("train", "train", 3, greedy=True), TASK, 7) == training[0]
    assert seed_of(Origin("train", "train", 3), TASK, 7, again=1) not in training
    evaluated = {seed_of(Origin("eval", "train", step), TASK, run) for step in (3, 4) for run in (0, 7)}
    assert evaluated == {episode_seed(2**31, TASK, 0)}
