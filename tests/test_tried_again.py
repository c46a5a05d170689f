"""Tasks that no episode of a group solved, sampled once more at a higher temperature."""

from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.backends.embedded import second_tries
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.checkpoint import restore, save_checkpoint
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.rollouts import StepBatch, load_sampled, save_sampled
from agent_rl.backends.embedded.scoring import score_rows
from agent_rl.backends.embedded.second_tries import SecondTries
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.group_sampling import episodes_of
from agent_rl.core.episode import Episode, EpisodeGroup
from agent_rl.engines.base import SamplingParams
from agent_rl.gym.registry import spec
from agent_rl.rollout import Job
from tests.luck_env import LUCK
from tests.runs import SMALL, config

HOT = 2.5


@pytest.fixture(autouse=True)
def skill(monkeypatch: pytest.MonkeyPatch) -> None:
    """What succeeds by luck is taken for a skill, but where a test says otherwise."""
    monkeypatch.setattr(second_tries, "RARE", 1.0)


def trainer_of(talker: Path, tmp_path: Path, **changes: object) -> Trainer:
    rollout = {**SMALL["rollout"], "groups": 8, "retry_temperature": HOT}  # type: ignore[dict-item]
    settings = config(tmp_path, env=LUCK, rollout=rollout, **changes)
    return Trainer(spec(LUCK), load_actor(talker, slots=8, context=256), settings)


def sampled(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> tuple[StepBatch, list[tuple[int, float]]]:
    """Sample a step; also return how many episodes were run at which temperature."""
    real, ran = trainer.rollouts.play_groups, list[tuple[int, float]]()

    def play(jobs: list[Job], params: SamplingParams) -> list[EpisodeGroup]:
        ran.append((len(jobs), params.temperature))
        return real(jobs, params)

    monkeypatch.setattr(trainer.rollouts, "play_groups", play)
    trainer.actor.engine.update_weights(trainer.step)
    return trainer.rollouts.sample(trainer.step), ran


def is_solved(group: EpisodeGroup) -> bool:
    return any(e.success for e in group.episodes)


def test_unsolved_task_is_tried_again_hotter(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = sampled(trainer_of(talker, tmp_path), monkeypatch)
    first, again = found.groups[:8], found.groups[8:]
    unsolved = [group for group in first if not is_solved(group)]
    assert [group.task for group in again] == [group.task for group in unsolved] and again
    assert ran == [(32, 1.0), (4 * len(again), HOT)]
    then = {group.task["n"]: group for group in again if is_solved(group)}
    expected = [group if is_solved(group) else then.get(group.task["n"], group) for group in first]
    assert found.batch == expected and then
    assert found.metrics == {
        "rollout/tried_again": len(again) / 8,
        "rollout/succeeded_then": np.mean([e.success for e in episodes_of(again)]),
        "rollout/learned_then": len(then) / len(again),
    }


def test_frequent_second_success_is_luck(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_tries, "RARE", 0.05)  # one of four succeeds
    trainer = trainer_of(talker, tmp_path)
    first, _ = sampled(trainer, monkeypatch)
    trainer.step = 1
    second, ran = sampled(trainer, monkeypatch)
    assert first.tried_again > 1 and first.metrics["rollout/succeeded_then"] > 0.05
    assert second.tried_again == 1 and [episodes for episodes, _ in ran[-2:]] == [32, 4]
    for found in (first, second):
        assert found.batch == found.groups[:8] and not found.metrics["rollout/learned_then"] and not found.hot


def test_checkpoint_remembers_how_second_tries_did(talker: Path, tmp_path: Path) -> None:
    whole, begun, resumed = (trainer_of(talker, tmp_path) for _ in range(3))
    begun.train_step()
    save_checkpoint(tmp_path / "checkpoint", begun)
    restore(tmp_path / "checkpoint", resumed)
    whole.train_step()
    assert resumed.rollouts.second_tries == whole.rollouts.second_tries != SecondTries()


def test_second_try_is_stored_beside_the_first(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = sampled(trainer_of(talker, tmp_path), monkeypatch)
    assert len({e.id for e in found.episodes}) == len({e.seed for e in found.episodes}) == 4 * len(found.groups) > 32
    assert found.first_tries == episodes_of(found.groups[:8])
    save_sampled(tmp_path / "ahead", [found])
    (loaded,) = load_sampled(tmp_path / "ahead")
    ids = [[e.id for e in episodes] for episodes in (loaded.first_tries, episodes_of(loaded.batch))]
    assert ids == [[e.id for e in episodes] for episodes in (found.first_tries, episodes_of(found.batch))]


def test_mostly_unsolved_batch_is_left_as_it_is(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Episode, "success", property(lambda episode: episode.origin.sample == 9))
    found, ran = sampled(trainer_of(talker, tmp_path), monkeypatch)
    assert ran == [(32, 1.0)] and len(found.groups) == 8 and not found.metrics


def test_control_tries_nothing_again(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ran = sampled(trainer_of(talker, tmp_path, shuffle_rewards=True), monkeypatch)
    assert ran == [(32, 1.0)]


@pytest.mark.parametrize(("proximal", "gap"), [("rollout", "train/rollout_gap"), ("recompute", "mismatch/gap_mean")])
def test_step_trains_them_as_the_others(talker: Path, tmp_path: Path, proximal: str, gap: str) -> None:
    step = trainer_of(talker, tmp_path, algorithm={"proximal": proximal}).train_step()
    assert len(step.episodes) > 32 and step.metrics["rollout/learned_then"] > 0 and step.metrics["perf/old_s"] > 0
    assert step.metrics["rollout/success"] == np.mean([e.success for e in step.episodes[:32]])
    assert step.metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert step.metrics[gap] == pytest.approx(0.0, abs=1e-4)


def test_second_tries_are_scored_as_if_not_hotter(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(talker, tmp_path)
    batch, _ = sampled(trainer, monkeypatch)
    x = batch.experience(trainer.algorithm)
    group = x.groups[x.rows.episode]
    found, _ = trainer.scorer.score(x.rows, group, 0, batch.hot)
    (logprobs,) = score_rows(trainer.actor.model, x.rows, ["logprobs"], 1.0, PrecisionConfig(), 512, group)
    torch.testing.assert_close(found.rows.rollout_logprobs, logprobs, atol=1e-4, rtol=0)
    assert found.old_logprobs is found.rows.rollout_logprobs
    moved = (found.rows.rollout_logprobs - x.rows.rollout_logprobs).abs()
    assert set(group[x.rows.episode_of_token[moved > 0]].tolist()) == set(batch.hot) and moved.max() > 0.1


def test_self_play_refuses_to_try_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        config(tmp_path, env="nim-v0", self_play=True, rollout={"groups": 2, "samples": 4, "retry_temperature": 2.0})
