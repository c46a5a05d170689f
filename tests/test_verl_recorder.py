"""agent_rl.rollout.naming and .recorder: what the episodes of a run on verl are called, and which are stored."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent_rl.backends.verl.driver.recorder import Recorder
from agent_rl.backends.verl.worker.rows import episode_of, rows_of
from agent_rl.core.episode import Origin, Outcome
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.gym.tasks import episode_seed
from agent_rl.rollout.naming import names_of, origin_of, seed_of
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from tests.doubles import example_episode


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


class Buffer:
    """verl's replay buffer: hands out the batches that it was given."""

    def __init__(self, *batches: object) -> None:
        self.batches = iter(batches)
        self.asked: list[tuple[int, str, int]] = []
        self.poll_interval = 2.0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[object, dict[str, float]]:
        self.asked.append((global_steps, partition_id, batch_size))
        return next(self.batches), {"waited": 1.0}


def batch_of(*episodes: Any) -> SimpleNamespace:
    """A batch whose rows carry these episodes."""
    return SimpleNamespace(fields=[fields.extra_fields for e in episodes for fields in rows_of(e)])


def test_what_an_evaluation_ran_is_stored_once_and_training_is_left_to_the_trainer(tmp_path: Path) -> None:
    fork = Trajectory(Fork(0, 4))
    fork.append([1, 2, 3], Source.PROMPT, 0)
    fork.append_completion(Completion((10, 30), (-0.5, -1.0), (-0.5, -1.0), FinishReason.STOP, (7, 7)), 1)
    plain = example_episode("test-00000-sampled-0000")
    branching = example_episode("test-00000-sampled-0001", trajectories=(*plain.trajectories, fork))
    failed = example_episode("test-00000-sampled-0002", trajectories=(), outcome=Outcome.FAILED, rewards=())
    training = replace(plain, id="train-00001-0000000-00")
    batches = [batch_of(plain, branching, failed), batch_of(training), batch_of(plain, failed)]
    buffer = Buffer(*batches)
    for attempt in range(2):  # a run, and its resumption
        with EpisodeWriter(tmp_path) as store:
            recorder = Recorder(buffer, store, lambda batch: map(episode_of, batch.fields))
            assert recorder.poll_interval == 2.0  # everything else is verl's
            for step, partition in ((0, "val"), (1, "train")) if not attempt else ((0, "val"),):
                found, metrics = recorder.sample(global_steps=step, partition_id=partition, batch_size=3)
                assert found is batches[len(buffer.asked) - 1] and metrics == {"waited": 1.0}
        stored = list(read_episodes(tmp_path))
        assert [e.id for e in stored] == [plain.id, branching.id, failed.id]
    assert buffer.asked == [(0, "val", 3), (1, "train", 3), (0, "val", 3)]
    assert len(stored[1].trajectories) == 2 and stored[2].outcome is Outcome.FAILED
