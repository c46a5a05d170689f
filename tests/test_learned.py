"""Token records of updates: every number back at the sampled token that it is of."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Experience, ScoredRows
from agent_rl.backends.run import Run
from agent_rl.core.episode import Episode, Outcome, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.runs.token_records import Learned
from agent_rl.store.episodes import read_episodes
from agent_rl.store.token_records import TokenRecord
from tests.doubles import example_episode


def branched(id: str, reward: float | None) -> Episode:
    """An episode whose second trajectory only repeats, and whose third repeats a reply of the first."""
    episode = example_episode(id)
    repeats, forked = Trajectory(Fork(0, 5)), Trajectory(Fork(0, 5))
    for trajectory in (repeats, forked):
        trajectory.append([1, 2, 3], Source.PROMPT, 0)
        trajectory.append_completion(Completion((10, 11), (-0.5, -0.0625), FinishReason.STOP, (7, 7)), 0)
    forked.append([5], Source.ENV, 0)
    forked.append_completion(Completion((14,), (-0.25,), FinishReason.STOP, (8,)), 1)
    failed = {"outcome": Outcome.FAILED} if reward is None else {}
    rewards = (replace(episode.rewards[0], value=reward or 0.0),)
    return replace(episode, trajectories=(*episode.trajectories, repeats, forked), rewards=rewards, **failed)


def learned(algorithm: AlgorithmConfig, episodes: list[Episode]) -> tuple[Learned, list[Episode]]:
    x: Experience = Algorithm(algorithm).experience(group_episodes(episodes))
    old = torch.where(x.rows.loss_mask, x.rows.rollout_logprobs - 0.5, 0.0)
    weighed, _, _ = Algorithm(algorithm).compute_weights_in_place_order(x, ScoredRows(x.rows, old))
    return Learned(weighed, x.kept), episodes


def by_place(records: list[TokenRecord]) -> dict[tuple[str, int], TokenRecord]:
    return {(r.episode, r.trajectory): r for r in records}


def test_records_leave_out_what_rows_leave_out() -> None:
    config = AlgorithmConfig(proximal="recompute", weight="token-tis")
    found, episodes = learned(config, [branched("good", 1.0), branched("bad", 0.0), branched("failed", None)])
    records = by_place(found.records(episodes, 4, config))
    assert list(records) == [(id, n) for id in ("good", "bad", "failed") for n in (0, 2)]
    good, fork = records["good", 0], records["good", 2]
    assert good.advantages is not None and fork.advantages is not None and good.step == 4
    np.testing.assert_allclose(good.logprobs, np.array([-1.0, -0.5625, -0.6, -3.0], np.float32))
    assert len(set(good.advantages.tolist())) == 1 and good.advantages[0] > 0
    np.testing.assert_array_equal(fork.logprobs, np.array([np.nan, np.nan, -0.75], np.float32))
    np.testing.assert_array_equal(fork.advantages, np.array([np.nan, np.nan, good.advantages[0]]))
    failed = records["failed", 0].advantages
    assert failed is not None and np.isnan(failed).all()


def test_records_know_what_updates_scored() -> None:
    config = AlgorithmConfig()
    found, episodes = learned(config, [branched("good", 1.0), branched("bad", 0.0)])
    width = int(found.weighed.rows.lengths[[3, 0]].max())
    found.scores.append((torch.tensor([3, 0]), torch.full((2, width), -7.0)))
    records = by_place(found.records(episodes, 0, config))
    known = {place: float(r.logprobs[-1]) for place, r in records.items()}
    assert known["good", 0] == known["bad", 2] == -7.0
    assert math.isnan(known["good", 2]) and math.isnan(known["bad", 0])
    pairs = AlgorithmConfig(objective="dpo", advantage="best-against-worst", aggregation="token-sum")
    assert all(r.advantages is None for r in found.records(episodes, 0, pairs))


def test_run_stores_records_of_its_episodes(folder: Path) -> None:
    trained = [e for e in read_episodes(folder) if e.origin.purpose == "train"]
    assert len(trained) == 4 * 3 * 4
    for episode in trained:
        group = np.array([e.reward for e in trained if e.group_id == episode.group_id])
        (record,) = Run(folder).token_records(episode.id)
        sampled = episode.trajectories[0].loss_mask
        assert record.step == episode.origin.step and len(record.logprobs) == sampled.sum()
        assert record.advantages is not None
        spread = group.std(ddof=1)
        wanted = 0.0 if spread == 0 else (episode.reward - group.mean()) / spread
        np.testing.assert_allclose(record.advantages, wanted, atol=1e-3)
        if wanted:  # theta is what sampled
            np.testing.assert_allclose(record.logprobs, episode.trajectories[0].logprobs[sampled], atol=1e-4)
