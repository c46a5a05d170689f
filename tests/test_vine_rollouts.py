"""VinePPO and GiGPO on real rollouts of a small embedded model."""

import asyncio
import math
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig
from agent_rl.algorithms.components import advantage
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.rollouts import StepBatch
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.group_sampling import episodes_of
from agent_rl.core.episode import Episode, Outcome, Reward
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import spec
from agent_rl.rollout import Job, continuation, run_jobs
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.doubles import Silent
from tests.runs import assert_same_run, config, weights, whole_and_killed

VINE = {"advantage": "state-values", "vine": {"continuations": 3, "max_episodes": 30}}


@pytest.fixture
def trainer(talker: Path, tmp_path: Path) -> Trainer:
    """A trainer of a model with several turns per episode."""
    return Trainer(spec("calculator-v0"), load_actor(talker, slots=8, context=256), config(tmp_path, algorithm=VINE))


def sampled(trainer: Trainer) -> StepBatch:
    trainer.actor.engine.update_weights(trainer.step)
    return trainer.rollouts.sample(trainer.step)


def test_continuations_score_like_the_training_forward(trainer: Trainer) -> None:
    episodes = [e for e in episodes_of(sampled(trainer).batch) if e.trainable]
    turns = [(e, turn) for e in episodes for turn in range(e.turns)]
    assert max(turn for _, turn in turns) >= 1
    jobs = [continuation(trainer.spec, e, turn, seed) for seed, (e, turn) in enumerate(turns)]
    policy = trainer.actor.policy(trainer.rollouts.params_of(0))
    runs = asyncio.run(run_jobs(jobs, policy, concurrency=8))
    differing = 0
    for (parent, turn), run in zip(turns, runs, strict=True):
        (old,), (new,) = parent.trajectories, run.trajectories
        start = old.before(turn)
        assert start is not None and run.parent == (parent.id, turn)
        assert new.token_ids[: len(start)].tolist() == start.tolist()
        assert not new.loss_mask[: len(start)].any() and new.loss_mask[len(start)]
        assert run.steps[:turn] == parent.steps[:turn] and run.reward is not None
        with torch.no_grad():
            ids = torch.tensor(new.token_ids[None].astype(np.int64))
            theta = score_tokens(trainer.actor.model, ids).logprobs[0].numpy()
        assert np.abs(theta[new.loss_mask] - new.logprobs[new.loss_mask]).max() < 1e-4
        differing += new.token_ids.tolist() != old.token_ids.tolist()
    assert differing > len(turns) / 4


@pytest.mark.parametrize("algorithm", [VINE, {"advantage": "over-greedy"}], ids=["continued", "greedy"])
def test_episodes_to_compare_with_are_run_again(
    algorithm: dict[str, object], talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, algorithm=algorithm, retries={"env_crash": 2})
    sampler = Trainer(spec("calculator-v0"), load_actor(talker, slots=8, context=256), settings).rollouts
    jobs, play = list[Job](), sampler.play
    monkeypatch.setattr(sampler, "play", lambda given, params: jobs.extend(given) or play(given, params))
    sampler.sample(0)
    assert jobs and all(job.retries == {"env_crash": 2} for job in jobs)
    assert all(job.branch is not None or job.origin.greedy for job in jobs)


def test_vine_values_are_reproducible_means(trainer: Trainer) -> None:
    given = sampled(trainer).batch
    batch = episodes_of(given)
    valued, metrics = trainer.rollouts.value(0, given)
    again, _ = trainer.rollouts.value(0, given)
    torch.testing.assert_close(valued, again, rtol=0, atol=0, equal_nan=True)
    known = valued.isfinite()
    assert metrics["vine/episodes"] == 30 and metrics["vine/valued"] == 10 <= metrics["vine/states"]
    assert known[:, 0].all()  # every episode's beginning
    by_group = {e.group_id: set[float]() for e in batch}
    for episode, row in zip(batch, valued, strict=True):
        by_group[episode.group_id].add(float(row[0]))
        for turn in range(episode.turns, len(row)):
            assert math.isnan(row[turn])
    assert all(len(values) == 1 for values in by_group.values())
    # three continuations that earn 0, .1, 1 or 1.1 each
    thirds = {round((a + b + c) / 3, 6) for a in (0, 0.1, 1, 1.1) for b in (0, 0.1, 1, 1.1) for c in (0, 0.1, 1, 1.1)}
    assert {round(v, 6) for v in valued[known].tolist()} <= thirds
    other, _ = trainer.rollouts.value(1, given)
    assert not torch.equal(other.nan_to_num(-1), valued.nan_to_num(-1))


def test_vine_values_states_for_advantages_without_discount(trainer: Trainer) -> None:
    @advantage("test-over-beginning", formula="A = R - V_0")
    def over_beginning(scores: torch.Tensor, state_values: torch.Tensor) -> torch.Tensor:
        return scores - state_values[:, 0]

    given = sampled(trainer).batch
    plain, _ = trainer.rollouts.value(0, given)
    own = AlgorithmConfig.model_validate(VINE | {"advantage": "test-over-beginning"})
    trainer.rollouts.algorithm = Algorithm(own)
    found, _ = trainer.rollouts.value(0, given)
    torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("ending", "value", "unscored"), [("exclude", 1.0, 10.0), ("mask", 34.0, 0.0)])
def test_vine_values_leave_excluded_endings_out(
    trainer: Trainer, ending: str, value: float, unscored: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, play = sampled(trainer).batch, trainer.rollouts.play
    endings = {"truncated": ending, "parse_error": ending}  # of a last reply that can't be read
    trainer.rollouts.algorithm = Algorithm(AlgorithmConfig.model_validate(VINE | {"endings": endings}))
    ends = ((100.0, Outcome.TRUNCATED), *[(1.0, Outcome.TERMINATED)] * 2)  # the first of the three is cut

    def first_is_cut(jobs: list[Job], params: SamplingParams) -> list[Episode]:
        found = zip(play(jobs, params), cycle(ends), strict=False)
        return [replace(e, rewards=(Reward("r", earned),), outcome=outcome) for e, (earned, outcome) in found]

    monkeypatch.setattr(trainer.rollouts, "play", first_is_cut)
    values, metrics = trainer.rollouts.value(0, given)
    assert set(values[values.isfinite()].tolist()) == {value} and metrics["vine/unscored"] == unscored


def test_continuations_are_neither_stored_nor_trained_on(trainer: Trainer) -> None:
    result = trainer.train_step()
    assert len(result.episodes) == 12 and all(e.parent is None for e in result.episodes)
    assert result.metrics["train/samples"] <= 12
    assert {"vine/states", "vine/valued", "vine/episodes", "vine/unscored", "vine/unjudged"} <= result.metrics.keys()


def test_shuffle_rewards_covers_continuations(trainer: Trainer) -> None:
    given = sampled(trainer).batch
    plain, _ = trainer.rollouts.value(0, given)
    trainer.rollouts.config = trainer.config.model_copy(update={"shuffle_rewards": True})
    dealt, _ = trainer.rollouts.value(0, given)
    known = plain.isfinite()
    assert torch.equal(known, dealt.isfinite())
    assert not torch.equal(plain[known], dealt[known])


@pytest.mark.sandbox
@pytest.mark.parametrize("algorithm", [VINE, {"advantage": "step-grouped"}], ids=["vineppo", "gigpo"])
def test_state_run_resumes_bit_for_bit(
    algorithm: dict[str, object], talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, algorithm=algorithm, start_from=str(talker))
    whole, killed = whole_and_killed(settings, monkeypatch)
    resume_run(killed, Progress())
    assert_same_run(whole, killed)
    first, last = load_actor(talker).model.state_dict(), weights(whole)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    stored, resumed = ({e.id: e.steps for e in read_episodes(f)} for f in (whole, killed))
    assert stored == resumed and all(isinstance(step.state, str) for steps in stored.values() for step in steps)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (VINE, r"silent-v0 has no snapshots: list the attributes .* in Silent\.snapshot_attributes"),
        ({"advantage": "step-grouped"}, r"silent-v0 does not say which that is: define Silent\.state_hash\(self\)"),
    ],
    ids=["vineppo", "gigpo"],
)
def test_start_run_refuses_environments_without_hooks(algorithm, problem, tmp_path: Path) -> None:
    settings = config(tmp_path, env=Silent.id, algorithm=algorithm, eval={"split": "eval", "dev_split": "eval"})
    with pytest.raises(ConfigError, match=problem):
        start_run(settings, Progress())
    assert not (tmp_path / "runs").exists()
