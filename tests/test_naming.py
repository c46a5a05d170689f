"""agent_rl.rollout.naming: the ids and seeds of a run's episodes on verl."""

from typing import Any

from agent_rl.core.episode import Origin
from agent_rl.gym.tasks import episode_seed
from agent_rl.rollout.naming import names_of, origin_of, seed_of


def row(**changes: object) -> dict[str, Any]:
    """What an agent loop is handed."""
    return {"split": "train", "evaluation": False, "global_steps": 3, "index": 12, "session_id": 1} | changes


def test_names_and_origin_of_a_training_row() -> None:
    assert names_of(row()) == ("train-00003-0000012", "train-00003-0000012-01")
    assert names_of(row(split="hard")) == names_of(row())
    assert origin_of(row(split="hard")) == Origin("train", "hard", 3, sample=1)
    assert names_of(row(), greedy=True)[1] == "train-00003-0000012-greedy"
    assert origin_of(row(), greedy=True) == Origin("train", "train", 3, greedy=True)


def test_names_and_origin_of_an_evaluation_row() -> None:
    for sampling in ("sampled", "greedy"):
        asked, greedy = row(evaluation=True, session_id=0), sampling == "greedy"
        group = f"train-00003-{sampling}"
        assert names_of(asked, greedy=greedy) == (group, f"{group}-0012")
        assert origin_of(asked, greedy=greedy) == Origin("eval", "train", 3, greedy=greedy)
    assert names_of(row(evaluation=True))[1] == "train-00003-sampled-0012-01"
    assert origin_of(row(evaluation=True)) == Origin("eval", "train", 3, sample=1)


def test_seeds_hang_on_the_step_in_training_only() -> None:
    task = {"expression": "3*4"}
    training = [seed_of(row(global_steps=step, session_id=s), task, 7) for step in (3, 4) for s in (0, 1)]
    assert len(set(training)) == 4
    assert training[0] == episode_seed(7 * 1_000_003 + 3, task, 0)  # as the embedded trainer's
    evaluated = {
        seed_of(row(evaluation=True, global_steps=step, session_id=0), task, run) for step in (3, 4) for run in (0, 7)
    }
    assert evaluated == {episode_seed(2**31, task, 0)}
