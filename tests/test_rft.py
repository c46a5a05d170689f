"""Rejection-sampling fine-tuning: what the filter keeps, the likelihood by hand, and a run on stored episodes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Denominators
from agent_rl.algorithms.explain import formula
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.config import load_config
from agent_rl.core.episode import Episode, Outcome, Reward, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.errors import ConfigError
from agent_rl.runs.metrics import read_metrics
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.view.progress import Progress
from tests.batches import weigh
from tests.doubles import example_episode
from tests.runs import config


def preset(*settings: str) -> AlgorithmConfig:
    return load_config("backend/embedded", TrainConfig, ["algorithm=rft", *settings]).algorithm


def episode(
    name: str, value: float | None, said: tuple[int, ...], group: str = "a", logprob: float = -0.5, **changes: object
) -> Episode:
    trajectory = Trajectory()
    trajectory.append([1, 2], Source.PROMPT, 0)
    if said:
        trajectory.append_completion(Completion(said, (logprob,) * len(said), FinishReason.STOP, (0,) * len(said)), 0)
    return example_episode(
        name, rewards=(Reward("r", value),), group_id=group, trajectories=(trajectory,), steps=(), **changes
    )


EPISODES = [
    episode("first", 1.0, (10, 11)),
    episode("same", 1.0, (10, 11)),
    episode("fails", 0.9, (10, 12)),
    episode("longer", 1.0, (10, 11, 12)),
    episode("unscored", None, (13,)),
    episode("broken", 1.0, (14,), outcome=Outcome.FAILED),
    episode("silent", 1.0, ()),
    episode("third", 2.0, (15,)),
    episode("other task", 1.0, (10, 11), "b"),
]


def kept(*settings: str) -> list[str]:
    x = Algorithm(preset(*settings)).experience(group_episodes(EPISODES))
    return [e.id for e, keep in zip(EPISODES, x.kept.tolist(), strict=True) if keep]


def test_successful_keeps_distinct_successes_of_a_task() -> None:
    assert kept() == ["first", "longer", "third", "other task"]
    filters = "algorithm.filters=[{name: successful, most: 2}]"
    assert kept(filters) == ["first", "longer", "other task"]
    assert kept(filters.replace("most: 2", "threshold: 2.0")) == ["third"]
    assert kept("algorithm.filters=[{name: successful, threshold: 5.0}]") == []


def test_successful_ignores_what_is_not_trained_on() -> None:
    cut = episode("cut", 1.0, (20,), outcome=Outcome.TRUNCATED)
    twin = episode("twin", 1.0, (20,))
    algorithm = Algorithm(preset("algorithm.endings.truncated=mask"))
    x = algorithm.experience(group_episodes([cut, twin]))
    assert x.kept.tolist() == [False, True]


def test_successful_takes_sums_that_rounding_leaves_below() -> None:
    rewards = tuple(Reward(f"r{weight}", 1.0, weight) for weight in (0.7, 0.2, 0.1))
    full, short = episode("full", 1.0, (20,)), episode("short", 0.999, (21,))
    x = Algorithm(preset()).experience(group_episodes([replace(full, rewards=rewards), short]))
    assert x.kept.tolist() == [True, False]


def test_likelihood_matches_a_hand_computation() -> None:
    algorithm = Algorithm(preset())
    batch, whole = weigh(algorithm, algorithm.experience(group_episodes(EPISODES)))
    assert batch.rows.episode.tolist() == [0, 3, 7, 8] and whole == Denominators(tokens=2 + 3 + 1 + 2, sequences=4)
    logits = torch.tensor(np.random.default_rng(0).normal(size=(*batch.rows.token_ids.shape, 32)), requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    logprobs = log_p.gather(-1, batch.rows.token_ids.long()[..., None])[..., 0]
    loss = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch.inputs, whole).loss
    said = [(row, 2 + at, token) for row, e in enumerate((0, 3, 7, 8)) for at, token in enumerate(_said(EPISODES[e]))]
    p = torch.softmax(logits.detach(), -1)
    assert loss.item() == pytest.approx(-sum(math.log(p[where]) for where in said) / 8, abs=1e-12)
    loss.backward()
    gradient = torch.zeros_like(p)
    for row, at, token in said:
        gradient[row, at] = p[row, at]
        gradient[row, at, token] -= 1
    torch.testing.assert_close(logits.grad, gradient / 8, atol=1e-12, rtol=0)


def _said(episode: Episode) -> list[int]:
    (trajectory,) = episode.trajectories
    return trajectory.token_ids[trajectory.loss_mask].tolist()


def test_likelihood_learns_from_tokens_without_logprobs() -> None:
    algorithm = Algorithm(preset())
    x = algorithm.experience(group_episodes([episode("a person's", 1.0, (10, 11), logprob=math.nan)]))
    batch, whole = weigh(algorithm, x)
    logprobs = torch.full(batch.rows.token_ids.shape, -1.5, requires_grad=True)
    loss = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch.inputs, whole).loss
    loss.backward()
    assert loss.item() == 1.5 and logprobs.grad is not None and logprobs.grad.tolist() == [[0, 0, -0.5, -0.5]]


def test_rft_explains_itself() -> None:
    assert formula(preset()) == (
        "the first `most` distinct episodes of a task with R >= threshold; A = 1; L = -A log theta, of any policy's "
        "tokens; sum over tokens / tokens of the batch"
    )


def test_rft_learns_from_stored_successes(talker: Path, tmp_path: Path) -> None:
    from agent_rl import api

    out = tmp_path / "episodes.jsonl"
    policy = api.load(talker, max_tokens=24, context=256)
    played = api.run("calculator-v0", policy, n=8, samples=4, split="train", seed=1)
    with EpisodeWriter(out) as writer:
        for each in played:
            writer.write(each)
    start = {"start_from": str(talker), "episodes": str(out), "steps": 1, "eval": {"n": 2, "dev_n": 2, "every": 0}}
    best = max(e.reward or 0 for e in played)
    chosen = preset(f"algorithm.filters=[{{name: successful, threshold: {best}}}]").model_dump()
    run = start_run(config(tmp_path, algorithm=chosen, **start), Progress())
    (row,) = (row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train")
    assert 1 <= float(str(row["train/samples"])) <= sum(e.reward == best for e in played)
    assert not any(e.origin.purpose == "train" for e in read_episodes(run))
    chosen = preset("algorithm.filters=[{name: successful, threshold: 99}]").model_dump()
    with pytest.raises(ConfigError, match="none with one that its filters keep as rft asks"):
        start_run(config(tmp_path, algorithm=chosen, **start), Progress())
