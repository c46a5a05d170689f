"""The trainer on real rollouts of a small embedded model: exactness, resume, interruption, and the files of a run."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.algorithms import Experience
from agent_rl.backends.embedded import stages
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.checkpoint import find_checkpoint, save_checkpoint
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.rollouts import shuffled
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.core.episode import group_episodes
from agent_rl.core.trajectory import Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.model_folder import in_format
from agent_rl.errors import CheckpointError, ConfigError, StoreError
from agent_rl.gym.registry import spec
from agent_rl.gym.tasks import TaskSource
from agent_rl.runs.diagnosis import Diagnosis
from agent_rl.runs.folder import name_of, new_folder, read_config
from agent_rl.runs.metrics import read_metrics
from agent_rl.runs.stop import Interrupted
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.view.progress import Progress
from tests.batches import scored
from tests.doubles import assert_plays_again
from tests.runs import SMALL, assert_same_run, config, killed_run, metrics_of, weights, whole_and_killed


@pytest.fixture
def trainer(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Trainer:
    """A trainer that starts from the finished run's weights; a test may give it settings."""
    settings = config(tmp_path, **getattr(request, "param", {}))
    return Trainer(spec("calculator-v0"), load_actor(folder / "checkpoint", slots=8, context=256), settings)


def test_run_starts_from_a_checkpoint_of_another(folder: Path, tmp_path: Path) -> None:
    start = str(shutil.copytree(folder / "checkpoint", tmp_path / "[/b]"))  # which is no markup
    again = start_run(config(tmp_path, steps=0, start_from=start), Progress())
    before, after = (weights(f) for f in (folder, again))
    assert all(torch.equal(before[name], after[name]) for name in before)
    known = [e.id for e in read_episodes(again / "episodes.jsonl")]
    assert len(known) == len(set(known)) == 3 * 8  # sampled, at a low temperature, greedy: once each
    summary = json.loads((again / "summary.json").read_text())
    assert summary["eval"]["before"] == summary["eval"]["after"]


def test_kill_after_the_warm_start_loses_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(["sampled", "low-temperature"])
    real = Trainer.evaluate

    def dies(self: Trainer, *args: object) -> object:
        if next(calls) == "low-temperature":
            raise MemoryError("killed")
        return real(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Trainer, "evaluate", dies)
        start_run(config(tmp_path), Progress())
    again = resume_run(tmp_path / "runs" / "latest", Progress(), steps=0)
    before = [row for row in metrics_of(folder) if row["step"] == 0 or row["kind"] in ("copying", "cloning")]
    assert metrics_of(again) == before and len(before) > 15


def test_run_writes_its_files(folder: Path) -> None:
    assert {"config.yaml", "metrics.jsonl", "episodes.jsonl", "checkpoint", "report.html", "summary.json"} <= {
        p.name for p in folder.iterdir()
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval"]["n"] == 8 and {"before", "after"} <= summary["eval"].keys()
    assert summary["wall_s"] > 0 and summary["peak_rss_mib"] > 50
    assert summary["demonstrations"]["n"] == 64 and 0 < summary["demonstrations"]["failed"] < 64
    assert (folder.parent / "latest").resolve() == folder.resolve()
    html = (folder / "report.html").read_text()
    assert "<svg" in html and "calculator-v0" in html


def test_checkpoint_loads_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    actor = load_actor(folder / "checkpoint", device="cpu")
    ids = torch.tensor([tokenizer.encode("compute 3*4+5")])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, actor.model(ids).logits)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "compute 3*4"}], add_generation_prompt=True)


def test_run_stores_episodes_once_with_sampled_ids(folder: Path) -> None:
    episodes = list(read_episodes(folder))
    assert len({e.id for e in episodes}) == len(episodes) == 4 * 12 + 6 * 8
    for episode in episodes:
        (trajectory,) = episode.trajectories
        assert trajectory.loss_mask.sum() == np.isfinite(trajectory.logprobs).sum() > 0
        assert trajectory.spans[0].source is Source.PROMPT


def test_stored_episodes_play_again(folder: Path) -> None:
    whole = [assert_plays_again(e) for e in read_episodes(folder)]
    assert len(whole) == 96 and any(whole)


def test_stored_logprobs_match_the_training_forward(trainer: Trainer) -> None:
    episodes = trainer.train_step().episodes  # sampled with the weights before the update ...
    again = Trainer(trainer.spec, trainer.actor, trainer.config)
    again.actor.engine.update_weights(0)
    params = trainer.rollouts.params_of(0)
    _, fresh = again.evaluate(
        trainer.spec.tasks.distinct("dev", 12), params, "dev", "check"
    )  # ... these with those after it
    assert any(e.trajectories for e in episodes)
    for episode in fresh:
        (trajectory,) = episode.trajectories
        with torch.no_grad():
            ids = torch.tensor(trajectory.token_ids[None].astype(np.int64))
            scored = score_tokens(trainer.actor.model, ids, params.temperature).logprobs
        mask = trajectory.loss_mask
        assert np.abs(scored[0].numpy()[mask] - trajectory.logprobs[mask]).max() < 1e-5


def test_final_temperature_is_reached_and_scored_as_sampled(folder: Path, tmp_path: Path) -> None:
    rollout = {**SMALL["rollout"], "final_temperature": 3.0}  # type: ignore[dict-item]
    settings = config(tmp_path, rollout=rollout, steps=3, algorithm={"filters": []})
    trainer = Trainer(spec("calculator-v0"), load_actor(folder / "checkpoint", slots=8, context=256), settings)
    for temperature in (1.0, 2.0, 3.0):
        assert trainer.rollouts.params_of(trainer.step).temperature == temperature
        metrics = trainer.train_step().metrics
        assert metrics.get("train/rollout_gap", 0.0) < 1e-5
    assert metrics["train/samples"]


def test_first_update_has_ratio_one(trainer: Trainer) -> None:
    for _ in range(4):
        metrics = trainer.train_step().metrics
        if metrics["train/samples"]:
            assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-4)
            assert metrics["train/rollout_gap"] < 1e-5 and metrics["train/clip_fraction"] == 0
            return
    pytest.fail("no step had a group with differing rewards")


def test_trainer_gradient_does_not_depend_on_cut(trainer: Trainer) -> None:
    episodes = trainer.train_step().episodes
    x = Experience.of(group_episodes(episodes))
    x = x.rescored(torch.as_tensor(np.random.default_rng(0).normal(size=len(episodes))))
    batch, whole = trainer.algorithm.compute_weights(x, scored(x.rows))
    model = trainer.actor.model.double()

    def gradient(budget: int) -> torch.Tensor:
        model.zero_grad()
        for part in batch.cut(budget):
            scores = score_tokens(model, part.rows.token_ids)
            trainer.algorithm.loss(scores.logprobs, scores.entropy, part.inputs, whole).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    reference = gradient(10**6)
    assert reference.norm() > 0
    for budget in (1, 200, 1000):
        # log-probabilities pass through float32 once, hence not 1e-12
        assert torch.allclose(gradient(budget), reference, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("trainer", [{}, {"gradient_checkpointing": True}], ids=["plain", "spared"], indirect=True)
def test_update_has_the_gradient_of_whole_rows(trainer: Trainer) -> None:
    """Micro-batches, logits of some tokens only and prompts computed once for a group change none of it."""
    episodes = trainer.train_step().episodes
    x = Experience.of(group_episodes(episodes))
    x = x.rescored(torch.as_tensor(np.random.default_rng(0).normal(size=len(episodes))))
    batch, whole = trainer.algorithm.compute_weights(x, scored(x.rows))
    model = trainer.actor.model

    def gradient() -> torch.Tensor:
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return found

    model.zero_grad()
    cuts = [cut for cut, _, _ in trainer.gradients(batch, whole)]
    assert sorted(row for cut in cuts for row in cut) == list(range(len(batch)))
    found = gradient()
    every = batch.padded()
    scores = score_tokens(model, every.rows.token_ids)
    trainer.algorithm.loss(scores.logprobs, scores.entropy, every.inputs, whole).loss.backward()
    expected = gradient()
    assert expected.norm() > 0 and (found - expected).norm() <= 2e-6 * expected.norm()


def test_gradients_are_summed_in_float32_through_prompts(trainer: Trainer) -> None:
    """Several processes sum those of the masters: none is left behind in a weight."""
    in_format(trainer.actor.model, "bfloat16")
    trainer = Trainer(trainer.spec, trainer.actor, trainer.config)
    x = Experience.of(group_episodes(trainer.train_step().episodes))
    x = x.rescored(torch.as_tensor(np.random.default_rng(0).normal(size=len(x.groups))))
    batch, whole = trainer.algorithm.compute_weights(x, scored(x.rows))
    assert len(list(trainer.gradients(batch, whole))) > 0
    assert all(weight.grad is None for weight in trainer.actor.model.parameters())
    assert all(master.grad is not None for master in trainer.optimizer.parameters)


EVERYTHING = {
    "kl": {"where": "loss", "coefficient": 0.01},
    "entropy": 0.01,
    "proximal": "recompute",
    "weight": "icepop",
    "rejection": "geometric",
    "denominators": "kept",
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.sandbox),
        {"algorithm": EVERYTHING, "updates": {"minibatches": 3, "epochs": 2}},
    ],
    ids=["default", "everything"],
)
def test_killed_run_resumes_bit_for_bit(
    changes: dict[str, object], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, **changes)
    if changes:
        folder, killed = whole_and_killed(settings, monkeypatch, dies_in="_add_gradients", call=3)
        trained = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("train/samples")]
        assert float(str(trained[0]["train/reference_kl"])) != 0 and float(str(trained[-1]["train/weight"])) > 0.9
    else:
        killed = killed_run(settings, monkeypatch)
    with (killed / "episodes.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "id": "torn')
    with pytest.warns(UserWarning, match="torn"):
        resume_run(killed, Progress())

    assert_same_run(folder, killed)
    stored, resumed = ({e.id: e for e in read_episodes(f)} for f in (folder, killed))
    assert stored.keys() == resumed.keys()
    for id, episode in stored.items():
        assert episode.messages == resumed[id].messages and episode.rewards == resumed[id].rewards
        assert np.array_equal(episode.trajectories[0].token_ids, resumed[id].trajectories[0].token_ids)


def test_resumed_run_forgets_what_came_after_its_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other settings, a judge or vLLM the steps are others, and so are what is diagnosed and its episodes."""
    killed, seen = killed_run(config(tmp_path), monkeypatch), list[list[object]]()
    file, trained = killed / "metrics.jsonl", [1, 2, 3]
    assert [row["step"] for row in read_metrics(file) if row["kind"] == "train"] == trained
    file.write_text("".join(json.dumps(row | {"odd": row["step"]}) + "\n" for row in read_metrics(file)))

    def diagnosis(*args: object, **settings: object) -> Diagnosis:
        seen.append([row["step"] for row in read_metrics(file) if row["kind"] == "train"])
        return Diagnosis(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(stages, "Diagnosis", diagnosis)
    resume_run(killed, Progress())
    assert seen == [trained[:2]]
    rows = metrics_of(killed)
    assert {row["step"] for row in rows if "odd" in row and row["kind"] == "train"} == {1, 2}
    assert [{name: row[name] for name in row if name != "odd"} for row in rows] == metrics_of(folder)
    undone = [e.id for e in read_episodes(killed / "episodes.jsonl.undone-1")]
    assert len(undone) == 12 and {id[:11] for id in undone} == {"train-00002"}
    assert [e.id for e in read_episodes(killed)] == [e.id for e in read_episodes(folder)]


def test_ctrl_c_stops_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Trainer.train_step

    def interrupted(self: Trainer):
        if self.step == 0:
            signal.raise_signal(signal.SIGINT)
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="resume="):
        start_run(config(tmp_path), Progress())
    assert signal.getsignal(signal.SIGINT) is before
    folder = tmp_path / "runs" / "latest"
    assert torch.load(find_checkpoint(folder / "checkpoint") / "trainer_state.pt")["step"] == 1
    for steps in (2, 3):  # a finished run can be extended, too
        resume_run(folder, Progress(), steps=steps)
        assert json.loads((folder / "summary.json").read_text())["steps"] == steps
    with pytest.raises(ConfigError, match="steps=2: the run has taken 3"):
        resume_run(folder, Progress(), steps=2)
    assert read_config(folder, TrainConfig).steps == 3
    ids = {e.id for e in read_episodes(folder)}
    assert {"eval-00000-sampled-0000", "eval-00002-greedy-0000", "eval-00003-sampled-0000"} <= ids


def test_checkpoint_survives_a_kill_between_moves(trainer: Trainer, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    trainer.step = 7
    save_checkpoint(target, trainer)
    target.rename(tmp_path / "checkpoint.old")
    assert find_checkpoint(target).name == "checkpoint.old"
    (tmp_path / "checkpoint.new").mkdir()  # begun, not finished
    assert find_checkpoint(target).name == "checkpoint.old"
    trainer.step = 8
    save_checkpoint(target, trainer)
    assert torch.load(find_checkpoint(target) / "trainer_state.pt")["step"] == 8


def test_resume_refuses_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run"):
        resume_run(tmp_path, Progress())
    with pytest.raises(CheckpointError, match="no checkpoint"):
        find_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_actor(tmp_path)


def test_refused_resume_changes_nothing_of_a_live_run(folder: Path, tmp_path: Path) -> None:
    live = shutil.copytree(folder, tmp_path / "live")
    before = {file.name: file.read_bytes() for file in live.iterdir() if file.is_file()}
    torn = live / "metrics.jsonl"  # as if the live run was just writing it
    torn.write_bytes(before["metrics.jsonl"] + b'{"kind": "tr')
    with EpisodeWriter(live), pytest.raises(StoreError, match="another writer"):
        resume_run(live, Progress(), steps=9)
    after = {file.name: file.read_bytes() for file in live.iterdir() if file.is_file()}
    assert after == before | {torn.name: before[torn.name] + b'{"kind": "tr'}


def test_shuffled_deals_rewards_to_other_episodes(trainer: Trainer) -> None:
    _, episodes = trainer.evaluate(
        trainer.spec.tasks.distinct("dev", 12), SamplingParams(max_tokens=24), "dev", "shuffle"
    )
    dealt = shuffled(episodes, np.random.default_rng(0))
    assert sorted(e.reward or 0 for e in dealt) == pytest.approx(sorted(e.reward or 0 for e in episodes))
    assert [e.value("correct") for e in dealt] == [e.value("correct") for e in episodes]


def test_distinct_tasks_are_distinct_and_bounded() -> None:
    tasks = spec("calculator-v0").tasks.distinct("eval", 50)
    assert len({t["expression"] for t in tasks}) == 50
    few = TaskSource(lambda split, index: {"n": index % 30})
    assert [task["n"] for task in few.distinct("eval", 50)] == [*range(30)], "there are not as many"


def test_run_is_named_by_the_address_of_its_environment(tmp_path: Path) -> None:
    folder = new_folder(str(tmp_path), name_of("http://[::1]:8000/lab/shop-v0"))
    assert folder.name.endswith("-http-1-8000-lab-shop-v0")
    assert [name_of(id) for id in ("shop-v0", "lab/shop-v0")] == ["shop-v0", "lab-shop-v0"]


def test_new_folder_refuses_unusable_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder"):
        new_folder(str(tmp_path), "../x")
