"""`async.mode=one_step_off` on the embedded backend: token ages, and resuming."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from pydantic import ValidationError

from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.checkpoint import AHEAD
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.rollouts import StepBatch, load_sampled, save_sampled
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.group_sampling import greedy_of
from agent_rl.config import load_config
from agent_rl.core.episode import Episode
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.gym.registry import spec
from agent_rl.runs.folder import read_config
from agent_rl.runs.metrics import read_metrics
from agent_rl.store.codec import dump_line
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.runs import SMALL, assert_same_run, config, weights, whole_and_killed

VINE = {"advantage": "state-values", "vine": {"continuations": 2, "max_episodes": 12}}
REMAX = {"advantage": "over-greedy"}
CORRECTED = {"proximal": "recompute", "weight": {"name": "token-tis", "cap": 5.0}}
DYNAMIC = CORRECTED | {"filters": ["varied-groups"], "refill": {"max_rounds": 3, "oversampling": 2.0}}


def settings(tmp_path: Path, talker: Path, max_staleness: int, algorithm: dict[str, object], **changes: object):
    ahead = {"mode": "one_step_off", "max_staleness": max_staleness}
    return config(tmp_path, start_from=str(talker), algorithm=algorithm, **{"async": ahead}, **changes)


def trainer_of(chosen: TrainConfig) -> Trainer:
    return Trainer(spec(chosen.env), load_actor(str(chosen.start_from), slots=8, context=256), chosen)


def lines(episodes: Iterable[Episode]) -> list[bytes]:
    """Episodes without the times that they took."""
    return [dump_line(replace(e, seconds=0.0), experts=True) for e in episodes]


def versions(episodes: list[Episode]) -> set[int]:
    """The weights that sampled the tokens of some episodes."""
    return {int(v) for e in episodes for t in e.trajectories for v in t.policy_versions[t.loss_mask]}


def assert_same_batch(one: StepBatch, two: StepBatch) -> None:
    assert lines(one.episodes) == lines(two.episodes) and lines(greedy_of(one.groups)) == lines(greedy_of(two.groups))
    assert (one.sampling, one.metrics) == (two.sampling, two.metrics)
    assert (one.state_values is None) == (two.state_values is None)
    if one.state_values is not None and two.state_values is not None:
        torch.testing.assert_close(one.state_values, two.state_values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k", [1, 2])
def test_one_step_off_trains_k_updates_behind(k: int, talker: Path, tmp_path: Path) -> None:
    trainer = trainer_of(settings(tmp_path, talker, k, CORRECTED, steps=5))
    for step in range(5):
        result = trainer.train_step()
        oldest = max(0, step - k)
        assert versions(result.episodes) == {oldest}
        assert {e.origin.step for e in result.episodes} == {step}
        assert result.metrics[f"policy_version/staleness_{step - oldest}"] == 1.0
        assert len(trainer.ahead) == min(k, 4 - step)  # no batch is sampled without a step to train on it
    _, episodes = trainer.evaluate(trainer.spec.tasks.distinct("dev", 4), trainer.rollouts.params_of(0), "dev", "dev")
    assert versions(episodes) == {5}


def test_one_step_off_corrections_see_the_gap(talker: Path, tmp_path: Path) -> None:
    trainer = trainer_of(settings(tmp_path, talker, 1, CORRECTED))
    first, second = (trainer.train_step().metrics for _ in range(2))
    assert first["train/samples"] and second["train/samples"]
    assert first["mismatch/gap_mean"] < 1e-5 < 1e-3 < second["mismatch/gap_mean"]  # old is recomputed, mu is not
    assert first["train/weight"] == pytest.approx(1.0, abs=1e-6) and abs(second["train/weight"] - 1) > 1e-5
    assert second["train/ratio"] == pytest.approx(1.0, abs=1e-4)  # against old


def test_one_step_off_takes_what_sampled_for_old(talker: Path, tmp_path: Path) -> None:
    trainer = trainer_of(settings(tmp_path, talker, 1, {}))
    first, second = (trainer.train_step().metrics for _ in range(2))
    assert first["train/old_kl"] < 1e-9 < 1e-6 < second["train/old_kl"] == second["train/rollout_kl"]
    assert "perf/old_s" not in second  # no forward pass is spent on it


@pytest.mark.parametrize(
    "algorithm",
    [CORRECTED, *(pytest.param(other, marks=pytest.mark.sandbox) for other in (REMAX, VINE, DYNAMIC))],
    ids=["corrected", "remax", "vine", "dynamic"],
)
def test_one_step_off_samples_with_the_previous_weights(
    algorithm: dict[str, object], talker: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(settings(tmp_path, talker, 1, algorithm))
    assert trainer.train_step().metrics["train/samples"]
    (waiting,) = trainer.ahead
    fresh = trainer_of(trainer.config)
    fresh.rollouts.sample(0)
    assert_same_batch(waiting, fresh.rollouts.sample(1))
    assert versions(greedy_of(waiting.groups)) == ({0} if algorithm is REMAX else set())
    assert (waiting.state_values is not None) == (algorithm is VINE)
    trainer.actor.engine.update_weights(1)
    assert lines(trainer.rollouts.sample(1).episodes) != lines(waiting.episodes)

    save_sampled(tmp_path / "ahead.pt", trainer.ahead)
    (read,) = load_sampled(tmp_path / "ahead.pt")
    assert_same_batch(waiting, read)


@pytest.mark.parametrize(
    ("k", "changes"),
    [
        pytest.param(1, {"algorithm": {}}, marks=pytest.mark.sandbox),
        (2, {"algorithm": CORRECTED, "updates": {"epochs": 2}}),
        pytest.param(1, {"algorithm": REMAX, "shuffle_rewards": True}, marks=pytest.mark.sandbox),
        pytest.param(2, {"algorithm": VINE}, marks=pytest.mark.sandbox),
        pytest.param(1, {"algorithm": DYNAMIC}, marks=pytest.mark.sandbox),
    ],
    ids=["grpo", "corrected", "remax-control", "vine", "dynamic"],
)
def test_one_step_off_resumes_bit_for_bit(
    k: int, changes: dict[str, object], talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path, talker, k, **changes)
    whole, killed = whole_and_killed(chosen, monkeypatch)
    assert "async" in OmegaConf.load(killed / "config.yaml")
    assert len(load_sampled(killed / "checkpoint" / AHEAD)) == min(k, 2)
    resume_run(killed, Progress())
    assert_same_run(whole, killed)
    assert not (killed / "checkpoint" / AHEAD).exists()
    stored, resumed = ({e.id: e for e in read_episodes(folder)} for folder in (whole, killed))
    assert lines(stored[id] for id in sorted(stored)) == lines(resumed[id] for id in sorted(resumed))
    trained = [row for row in read_metrics(killed / "metrics.jsonl") if row["kind"] == "train"]
    assert [row.get(f"policy_version/staleness_{k}", 0) for row in trained] == [float(s >= k) for s in range(4)]
    aged = [
        (s, {x for x in row if x.startswith("mismatch/age_")}) for s, row in enumerate(trained) if row["train/samples"]
    ]
    assert aged and all(found == {f"mismatch/age_{min(s, k)}"} for s, found in aged)
    start = load_actor(talker).model.state_dict()
    assert any(not torch.equal(start[name], value) for name, value in weights(killed).items())


def test_batch_sampled_ahead_keeps_its_temperature(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmer = {**SMALL["rollout"], "final_temperature": 3.0}  # type: ignore[dict-item]
    _, killed = whole_and_killed(settings(tmp_path, talker, 1, {}, rollout=warmer), monkeypatch)
    with pytest.raises(ConfigError, match=r"step 3 is sampled already, at the temperature 2.333 .* in 4 steps"):
        resume_run(killed, Progress(), steps=8)
    assert read_config(killed, TrainConfig).steps == 4


@pytest.mark.sandbox
def test_one_step_off_extends_a_finished_run(talker: Path, tmp_path: Path) -> None:
    folder = start_run(settings(tmp_path, talker, 2, {}, steps=2), Progress())
    resume_run(folder, Progress(), steps=5)
    found = {e.origin.step: versions([e]) for e in read_episodes(folder) if e.origin.purpose == "train"}
    assert found == {step: {version} for step, version in enumerate([0, 0, 2, 2, 2])}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "separate"}, r"async\.mode=separate.* one process .*set async\.mode=one_step_off, or backend=verl"),
        ({"mode": "one_step_off", "on_stale": "wait"}, r"async\.on_stale=wait: batches are sampled in turn"),
        ({"max_staleness": 2}, r"async\.max_staleness=2 changes nothing.*set async\.mode=one_step_off"),
    ],
)
def test_embedded_backend_refuses_other_async_settings(
    changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=problem):
        config(tmp_path, **{"async": changes})


def test_stored_episodes_refuse_sampling_ahead(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="with episodes=elsewhere nothing is sampled"):
        algorithm = load_config("backend/embedded", TrainConfig, ["algorithm=dpo"]).algorithm.model_dump()
        config(tmp_path, algorithm=algorithm, episodes="elsewhere", **{"async": {"mode": "one_step_off"}})


def test_async_section_is_set_on_the_command_line() -> None:
    chosen = load_config("backend/embedded", TrainConfig, ["async.mode=one_step_off", "async.max_staleness=3"])
    assert chosen.steps_ahead == 3 and load_config("backend/embedded", TrainConfig, []).steps_ahead == 0


def test_load_sampled_refuses_batches_of_an_earlier_version(tmp_path: Path) -> None:
    refill = {"target": 1, "max_rounds": 1, "oversampling": 1.0, "expected_rate": 1.0, "offered": 1, "taken": (0,)}
    torch.save([{"episodes": "", "greedy": "", "refill": refill}], tmp_path / "ahead.pt")
    with pytest.raises(CheckpointError, match="earlier version of agent_rl"):
        load_sampled(tmp_path / "ahead.pt")
