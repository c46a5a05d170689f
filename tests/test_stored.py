"""Learning from stored episodes: indexing, order, errors, and a run from start to resume."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.cli import main
from agent_rl.core.episode import Episode, Origin, Outcome, Reward
from agent_rl.core.trajectory import Trajectory
from agent_rl.errors import ConfigError, DamagedEpisodeError, StoreError
from agent_rl.gym.registry import spec
from agent_rl.gym.tasks import task_key
from agent_rl.rendering import train_tokenizer
from agent_rl.rendering.config import RendererConfig
from agent_rl.runs.folder import read_warnings
from agent_rl.runs.metrics import read_metrics
from agent_rl.runs.stored_groups import StoredGroups, index_groups
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.view.progress import Progress
from tests.doubles import example_episode
from tests.runs import config, metrics_of, weights, whole_and_killed

DPO = {"name": "dpo", "objective": "dpo", "advantage": "best-against-worst", "aggregation": "token-sum"}


def algorithm(margin: float = 0.0) -> Algorithm:
    return Algorithm(
        AlgorithmConfig.model_validate(DPO | {"advantage": {"name": "best-against-worst", "margin": margin}})
    )


def episode(id: str, reward: float | None, group: str = "", **changes: object) -> Episode:
    group = group or id.rpartition("-")[0]
    return example_episode(id, rewards=(Reward("r", reward),), group_id=group, task={"group": group}, **changes)


def write(folder: Path, *episodes: Episode) -> Path:
    with EpisodeWriter(folder) as writer:
        for each in episodes:
            writer.write(each)
    return folder


def pair(group: str, **changes: object) -> list[Episode]:
    return [episode(f"{group}-{i:02d}", float(i), **changes) for i in range(2)]


def taken(stored: StoredGroups) -> list[list[str]]:
    return [[e.id for e in stored.read(i)] for i in range(len(stored.groups))]


# --- selection ---


def test_index_groups_takes_varied_training_groups(tmp_path: Path) -> None:
    unlike = pair("train-00000-000")
    alike = [replace(e, rewards=unlike[0].rewards) for e in pair("train-00000-001")]
    evaluations = [
        *pair("eval-00002-sampled", origin=Origin("eval", "eval", 2)),
        *pair("train-00000-003", origin=Origin("eval", "train", 2)),  # ids mean nothing
        *pair("train-00000-004", origin=Origin("train", "train", 0, greedy=True)),
    ]
    rolled_out = pair("5f3c", origin=Origin("rollout", "eval"))
    unscored = [episode("train-00001-000-00", None), episode("train-00001-000-01", 1.0)]
    lost = [episode("train-00001-001-00", 0.0, outcome=Outcome.FAILED), episode("train-00001-001-01", 1.0)]
    mute = pair("train-00001-002", trajectories=())
    later = pair("train-00012-1000")
    file = write(tmp_path, *unlike, *alike, *evaluations, *rolled_out, *unscored, *lost, *mute, *later)
    found = index_groups(file, "shop-v0", algorithm())
    assert found.file == tmp_path and found.largest_token == 13
    assert taken(found) == [[e.id for e in group] for group in (unlike, rolled_out, later)]
    held_out = {task_key(unlike[0].task)}
    assert taken(index_groups(file, "shop-v0", algorithm(), held_out)) == [
        [e.id for e in group] for group in (rolled_out, later)
    ]
    with pytest.raises(ConfigError, match=r"5 groups with 10 episodes.*Left out: 6 of eval.*2 of tasks .*2 without"):
        index_groups(file, "shop-v0", algorithm(margin=1.0), held_out)


def test_index_groups_separates_tasks_of_one_group_id(tmp_path: Path) -> None:
    one, two = pair("train-00000-000"), pair("train-00000-000")
    two = [replace(e, id=f"{e.id}7", task={"other": 1}) for e in two]
    write(tmp_path, one[0], two[0], one[1], two[1])
    found = index_groups(tmp_path, "shop-v0", algorithm())
    assert taken(found) == [[e.id for e in one], [e.id for e in two]]
    assert len({e.group_id for e in found.batch(0, 0, 2)}) == 2


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([], "0 groups with 0 episodes"),
        (pair("train-00000-000", trajectories=()), "2 without sampled token ids"),
        (pair("a", origin=Origin("eval")), "2 of evaluations"),
        (pair("train-00000-000", env="other-v0"), "train-00000-000-00 is of other-v0, and this run trains on shop-v0"),
    ],
)
def test_index_groups_explains_an_empty_result(episodes: list[Episode], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        index_groups(write(tmp_path, *episodes), "shop-v0", algorithm())


# --- order ---


def test_stored_epochs_shuffle_every_group_once(tmp_path: Path) -> None:
    write(tmp_path, *(e for g in range(6) for e in pair(f"train-00000-{g:03d}")))
    stored = index_groups(tmp_path, "shop-v0", algorithm())

    def groups(seed: int, step: int, size: int = 2) -> list[str]:
        return [e.id[:15] for e in stored.batch(seed, step, size)[::2]]

    epochs = [[g for step in range(3 * epoch, 3 * epoch + 3) for g in groups(1, step)] for epoch in range(3)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [groups(1, step) for step in range(3)] != [groups(2, step) for step in range(3)]
    assert groups(1, 4) == groups(1, 4)
    # four do not go into six: two wait for the next epoch; and there are no more than six
    assert [len(groups(0, step, 4)) for step in range(3)] == [4, 4, 4]
    assert len(set(groups(0, 5, 100))) == 6
    assert all(len(set(groups(0, step, 4))) == 4 for step in range(20))


def test_stored_index_survives_appended_episodes_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", *pair("train-00000-000"), *pair("train-00000-001"))
    stored = index_groups(folder, "shop-v0", algorithm())
    stored.save(tmp_path / "index.json")
    write(folder, *pair("train-00001-000"))
    again = StoredGroups.load(tmp_path / "index.json")
    assert again == stored and len(taken(again)) == 2
    file = folder / "episodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[2:]))
    with pytest.raises(StoreError, match=r"was changed since this run began: group train-00000-000"):
        again.read(0)
    file.write_bytes(b" " + b"".join(lines))
    with pytest.raises(DamagedEpisodeError, match="no episode begins at byte"):
        again.read(1)
    file.unlink()
    with pytest.raises(StoreError, match="are gone"):
        StoredGroups.load(tmp_path / "index.json")


# --- tokenizers ---


def test_check_tokens_requires_the_same_tokenizer(folder: Path) -> None:
    stored = index_groups(folder, "calculator-v0", algorithm())
    actor = load_actor(folder / "checkpoint", slots=1)
    stored.check_tokens(len(actor.tokenizer), actor.decode)
    with pytest.raises(ConfigError, match=r"have the token id 9999, but there are 4\d\d tokens: start from"):
        replace(stored, largest_token=9999).check_tokens(len(actor.tokenizer), actor.decode)
    other = train_tokenizer(["a quite different text, of which nothing is about sums"] * 50, 480)
    with pytest.raises(ConfigError, match=r"don't read .* with this tokenizer: they were made by another"):
        replace(stored, largest_token=1).check_tokens(len(other), replace(actor, tokenizer=other).decode)


def test_is_rendered_by_tells_formats_apart(folder: Path, tmp_path: Path) -> None:
    stored = index_groups(folder, "calculator-v0", algorithm())
    assert stored.is_rendered_by(load_actor(folder / "checkpoint", slots=1).renderer)
    plain = RendererConfig(name="plain")
    assert not stored.is_rendered_by(load_actor(folder / "checkpoint", slots=1, renderer=plain).renderer)
    run = start_run(settings(tmp_path, folder, steps=0, renderer=plain.model_dump()), Progress())
    assert any("prompts end otherwise than this model's renderer" in said for said in read_warnings(run))


# --- runs ---


def settings(tmp_path: Path, folder: Path, **changes: object):  # type: ignore[no-untyped-def]
    start = str(folder / "checkpoint")
    return config(
        tmp_path, **{"algorithm": DPO, "episodes": str(folder), "start_from": start, "rollout": ROLLOUT} | changes
    )


ROLLOUT = {"groups": 2, "samples": 4, "slots": 8, "max_tokens": 24}


def test_dpo_run_on_stored_episodes_learns(folder: Path, tmp_path: Path) -> None:
    run = start_run(settings(tmp_path, folder, updates={"epochs": 2}), Progress())
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 4 and all(row["train/pairs"] in (1.0, 2.0) for row in rows)
    # means of two updates: at the start theta is the reference, the second update sees what the first one did
    assert float(str(rows[0]["train/loss"])) < np.log(2) and float(str(rows[0]["rewards/margins"])) > 0
    assert float(str(rows[0]["rewards/accuracies"])) == 0.5
    assert not any(name.startswith("rollout/s") for row in rows for name in row)
    assert {e.origin.purpose for e in read_episodes(run)} == {"eval"}  # nothing was sampled to train on
    start, reference = (weights_in(f) for f in (folder / "checkpoint", run / "reference"))
    assert all(torch.equal(start[name], reference[name]) for name in start)
    assert not (folder / "reference").exists()  # it is not needed there
    assert not all(torch.equal(start[name], value) for name, value in weights(run).items())
    places = json.loads((run / "stored_groups.json").read_text())
    known = {e.id for e in read_episodes(folder) if e.origin.purpose == "train"}
    assert Path(places["file"]) == folder and 0 < len(places["groups"]) < len(known) / 4
    assert "groups from" in (run / "report.html").read_text()


@pytest.mark.parametrize(("logprob", "bound", "updates"), [(-9.0, 0.5, 3.0), (math.nan, 1e-9, 1.0)])
def test_target_kl_bounds_the_step_on_stored_episodes(
    logprob: float, bound: float, updates: float, folder: Path, tmp_path: Path
) -> None:
    """It is no distance from who sampled them: another policy, or a person, of whom there are no log-probabilities."""

    def by_another(t: Trajectory) -> Trajectory:
        return Trajectory.restore(t.token_ids.tolist(), t.spans, [logprob] * t.sampled, None, t.forked_from)

    stored = [e for e in read_episodes(folder) if e.origin.purpose == "train"]
    file = write(tmp_path / "s", *(replace(e, trajectories=tuple(map(by_another, e.trajectories))) for e in stored))
    run = settings(tmp_path, folder, episodes=str(file), steps=1, updates={"epochs": 3, "target_kl": bound})
    (row,) = (row for row in metrics_of(start_run(run, Progress())) if row["kind"] == "train")
    assert row["train/updates"] == updates and row["update/1/old_kl"] == pytest.approx(0, abs=1e-10)


def test_dpo_learns_from_the_rollout_command(talker: Path, tmp_path: Path) -> None:
    out = tmp_path / "rolled" / "episodes.jsonl"
    command = ["rollout", "split=train", "n=6", "samples=4", f"policy={talker}", "max_tokens=24", f"out={out}"]
    assert main(command) == 0
    assert {(e.origin.purpose, e.origin.split) for e in read_episodes(out)} == {("rollout", "train")}
    assert sorted(e.origin.sample for e in read_episodes(out)) == sorted([0, 1, 2, 3] * 6)
    run = start_run(
        config(tmp_path, algorithm=DPO, episodes=str(out), start_from=str(talker), rollout=ROLLOUT, steps=2), Progress()
    )
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 2 and all(float(str(row["train/pairs"])) >= 1 for row in rows)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_actor(folder).model.state_dict()


def test_stored_run_resumes_bit_for_bit(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = whole_and_killed(settings(tmp_path, folder), monkeypatch)
    first = next(row for row in metrics_of(whole) if row["kind"] == "train")
    # theta is the reference, as for any stored episodes
    assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-9) and first["rewards/margins"] == 0
    monkeypatch.chdir(tmp_path)
    resume_run(killed, Progress())
    one, two = weights(whole), weights(killed)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert metrics_of(killed) == metrics_of(whole)


def test_trainer_learns_stored_tokens_as_sampled(folder: Path, tmp_path: Path) -> None:
    run = settings(tmp_path, folder)
    stored = index_groups(folder, "calculator-v0", algorithm())
    actor, start = (load_actor(folder / "checkpoint", slots=8, context=256) for _ in range(2))
    trainer = Trainer(spec("calculator-v0"), actor, run, start.model, stored)
    seen = []
    trainer.update = lambda x: seen.append(x) or {}  # type: ignore[func-returns-value, method-assign, assignment]
    assert trainer.train_step().episodes == [] and trainer.step == 1
    by_id = {e.id: e for e in read_episodes(folder)}
    expected = [by_id[e.id].trajectories[0].token_ids.tolist() for e in stored.batch(run.seed, 0, 2)]
    assert [ids.tolist() for ids in seen[0].rows.token_ids.split(seen[0].rows.lengths.tolist())] == expected
    assert Counter(seen[0].groups.tolist()) == {0: 4, 1: 4}
    with pytest.raises(ConfigError, match="compares with the start of the run"):
        Trainer(spec("calculator-v0"), actor, run, None, stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {}}, "objective=ppo-clip learns from rollouts"),
        ({"algorithm": DPO | {"filters": ["varied-groups"], "refill": {"max_rounds": 2}}}, "as many as there are"),
    ],
)
def test_stored_episodes_refuse_sampling_settings(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **({"episodes": "runs/a"} | changes))


def test_start_run_refuses_missing_stored_episodes(folder: Path, tmp_path: Path) -> None:
    missing = settings(tmp_path, folder).model_copy(update={"episodes": str(tmp_path / "nowhere")})
    with pytest.raises(StoreError, match="no episode file"):
        start_run(missing, Progress())
    other = settings(tmp_path, folder).model_copy(update={"env": "search-v0"})
    with pytest.raises(ConfigError, match="is of calculator-v0, and this run trains on search-v0"):
        start_run(other, Progress())
    assert not (tmp_path / "runs").exists()
