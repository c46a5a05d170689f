"""agent_rl.rollout.naming: the ids and seeds of a run's episodes on verl."""

from typing import Any

import pytest

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.gym.tasks import episode_seed
from agent_rl.rollout.naming import names_of, seed_of
from agent_rl.runs.report import evaluation_tag
from agent_rl.runs.stored_groups import TRAINING_ID


def row(**changes: object) -> dict[str, Any]:
    """What an agent loop is handed."""
    return {"split": "train", "evaluation": False, "global_steps": 3, "index": 12, "session_id": 1} | changes


def test_training_episodes_are_called_as_the_embedded_trainer_does() -> None:
    assert names_of(row()) == ("train-00003-0000012", "train-00003-0000012-01")
    assert names_of(row(split="hard")) == names_of(row())
    assert TRAINING_ID.fullmatch(names_of(row())[1])


@pytest.mark.parametrize("split", ["test", "train"])
def test_an_evaluation_can_be_told_from_training_even_on_the_same_split(split: str) -> None:
    config = TrainConfig.model_validate({"env": "calculator-v0", "eval": {"split": split}})
    for sampling in ("sampled", "greedy"):
        tag = evaluation_tag(config, 3, sampling)
        asked = row(split=split, evaluation=True, session_id=0)
        assert names_of(asked, greedy=sampling == "greedy") == (tag, f"{tag}-0012")
        assert not TRAINING_ID.fullmatch(f"{tag}-0012")
    assert names_of(row(split=split, evaluation=True))[1] == f"{split}-00003-sampled-0012-01"


def test_seeds_hang_on_the_step_in_training_only() -> None:
    task = {"expression": "3*4"}
    training = [seed_of(row(global_steps=step, session_id=s), task, 7) for step in (3, 4) for s in (0, 1)]
    assert len(set(training)) == 4
    assert training[0] == episode_seed(7 * 1_000_003 + 3, task, 0)  # as the embedded trainer's
    evaluated = {
        seed_of(row(evaluation=True, global_steps=step, session_id=0), task, run) for step in (3, 4) for run in (0, 7)
    }
    assert evaluated == {episode_seed(2**31, task, 0)}
