"""agent_rl.backends.verl.driver.replay_buffer, in front of verl's own replay buffer and a queue in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from doubles import example_episode  # site-packages has a `tests`, too
from verl.trainer.ppo.v1 import replay_buffer

from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.driver import replay_buffer as module
from agent_rl.backends.verl.driver.received import ReceivedBatch
from agent_rl.backends.verl.driver.replay_buffer import EpisodeReplayBuffer
from agent_rl.core.episode import Episode, EpisodeGroup, Origin, Outcome, Reward
from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.gym.env import Env
from agent_rl.gym.registry import register, spec
from agent_rl.gym.reward import group_reward
from agent_rl.runs.metrics import MetricsFile, read_metrics
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from on_verl.queue_double import Queue, Rollout, prompts_of

DAPO = {"filters": ["varied-groups"], "refill": {"max_rounds": 3, "oversampling": 2.0}}
VINE = {"advantage": "state-values", "vine": {"continuations": 2, "max_episodes": 6}}


def episode(index: int, number: int | str, reward: float, **changes: object) -> Episode:
    name = f"train-00001-{index:07d}"
    return example_episode(f"{name}-{number}", group_id=name, rewards=(Reward("correct", reward),), **changes)


def group(index: int, *rewards: float) -> list[Episode]:
    return [episode(index, f"{number:02d}", reward) for number, reward in enumerate(rewards)]


class Setup:
    """A buffer whose groups are given; two samples a group."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        algorithm: dict[str, Any],
        groups: dict[int, Sequence[Episode]],
        kind: type[replay_buffer.ReplayBuffer] = replay_buffer.ReplayBuffer,
        env: str = "calculator-v0",
    ) -> None:
        self.queue = Queue()
        patch.setattr(replay_buffer, "tq", self.queue)
        patch.setattr(module, "tq", self.queue)
        self.rollout = Rollout(self.queue, lambda index: groups[index])
        self.rows: list[dict[str, Any]] = []
        verls = kind("sync", {}, 2, "drop", {}, poll_interval=0.0, refill_fn=self.rollout.refill, train_batch_size=2)
        self.store, self.folder = EpisodeWriter(folder), folder
        self.metrics = MetricsFile(folder)
        self.buffer = EpisodeReplayBuffer(
            verls,
            Algorithm(AlgorithmConfig.model_validate(algorithm)),
            self.store,
            self.metrics,
            self.submit,
            env=spec(env),
            samples=2,
            seed=0,
        )

    def submit(self, rows: Any) -> None:
        """Run continuations: each earns its seed's last digit."""
        for row in range(len(rows)):
            branch = json.loads(rows["branch"][row])
            self.rows.append(branch | {"n": rows["__rollout_n__"][row]})
            earned = (Reward("correct", float(branch["seed"] % 10)),)
            self.queue.finish(rows["uid"][row], [example_episode(f"c{row}", rewards=earned)], rows["global_steps"])

    def sample(self, target: int = 2) -> tuple[list[str], dict[str, Any]]:
        """Do as verl's trainer: submit a batch, then sample one; return its prompts and metrics."""
        self.rollout.refill(target)
        batch, metrics = self.buffer.sample(1, "train", target)
        assert set(batch.keys) == set(self.queue.tags["train"]), "what is not in the batch must not stay in the queue"
        assert len(batch.tags) == len(batch.keys) and not any("is_prompt" in tag for tag in batch.tags)
        return prompts_of(batch), metrics

    def stored(self) -> list[str]:
        self.store.flush()
        return [e.id for e in read_episodes(self.folder)]


def test_replay_buffer_replaces_filtered_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # of 2 + 2 + 4 groups, 1, 4, 5 and 7 vary: the second round has none, so the third is as large as it may be
    rewards = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 1), 4: (1, 0), 5: (0, 1), 6: (0, 0), 7: (0, 1)}
    setup = Setup(tmp_path, monkeypatch, DAPO, {i: group(i, *r) for i, r in rewards.items()})
    prompts, metrics = setup.sample()
    assert prompts == ["prompt1", "prompt4"]  # in the order of the tasks, not of their ends
    # 1 missing, (offered + 1) / (accepted + 1): 3/2, then 5/2
    assert setup.rollout.submitted == [2, 2, 3]
    assert metrics["rollout/rounds"] == 3 and metrics["rollout/batch_filled"] == 1.0
    assert setup.stored() == [f"train-00001-{i:07d}-{n:02d}" for i in (0, 2, 3, 5, 6) for n in (0, 1)]


def test_groups_of_a_batch_are_its_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(tmp_path, monkeypatch, {}, {i: group(i, 0, 1) for i in range(3)})
    setup.rollout.refill(3)
    batch, _ = setup.buffer.sample(1, "train", 3)
    assert prompts_of(batch) == ["prompt2", "prompt1", "prompt0"]  # as they ended
    assert module.groups_of(batch) == {f"prompt{i}": f"train-00001-{i:07d}" for i in range(3)}


def test_replay_buffer_async_keeps_groups_sampled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {i: group(i, float(i == 0), 1.0) for i in range(9)}
    setup = Setup(tmp_path, monkeypatch, DAPO, groups, replay_buffer.ReplayBufferAsync)
    setup.rollout.refill(2)
    setup.rollout.step = 2
    setup.rollout.refill(2)
    batch, metrics = setup.buffer.sample(2, "train", 2)
    assert setup.rollout.submitted == [2, 2, 2] and metrics["rollout/rounds"] == 2
    oldest, other = prompts_of(batch)
    assert oldest == "prompt1" and other in {"prompt2", "prompt3", "prompt4", "prompt5"}
    assert sum("is_prompt" in tag for tag in setup.queue.tags["train"].values()) == 2
    assert len(setup.stored()) == 2 * 2  # the dropped group, and the one too many


def test_replay_buffer_returns_a_smaller_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(tmp_path, monkeypatch, DAPO, {i: group(i, float(i == 0), 0.0) for i in range(20)})
    prompts, metrics = setup.sample(3)
    assert prompts == ["prompt0"] and len(setup.rollout.submitted) == 3
    assert metrics["rollout/batch_filled"] == pytest.approx(1 / 3)
    assert len(setup.stored()) == 2 * (sum(setup.rollout.submitted) - 1)


def test_replay_buffer_falls_back_to_the_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(tmp_path, monkeypatch, DAPO, {i: group(i, 1.0, 1.0) for i in range(20)})
    prompts, metrics = setup.sample()
    assert setup.rollout.submitted == [2, 4, 4] and metrics["rollout/batch_filled"] == 0.0
    assert prompts == [f"prompt{i}" for i in range(6, 10)]
    assert len(setup.stored()) == 2 * 6


def test_replay_buffer_keeps_filtered_groups_without_dynamic_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path, monkeypatch, {"filters": ["varied-groups"]}, {i: group(i, 1.0, 1.0) for i in range(2)})
    prompts, metrics = setup.sample()
    assert sorted(prompts) == ["prompt0", "prompt1"] and setup.rollout.submitted == [2]
    assert setup.stored() == [] and "rollout/rounds" not in metrics


def test_replay_buffer_sets_greedy_episodes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = {0: 0.25, 1: 0.75}
    groups = {i: [*group(i, 1.0, 1.0), episode(i, "greedy", reward)] for i, reward in greedy.items()}
    setup = Setup(tmp_path, monkeypatch, {"advantage": "over-greedy"}, groups)
    prompts, _ = setup.sample()
    assert prompts == ["prompt0", "prompt1"]
    assert {key.split("_")[1] for key in setup.queue.tags["train"]} == {"0", "1"}  # the third session is the greedy one
    received = setup.buffer.add_to(ReceivedBatch([*group(1, 1.0, 1.0), *group(0, 1.0, 1.0)], []))
    x = received.experience(Algorithm(AlgorithmConfig.model_validate({"advantage": "over-greedy"})))
    assert x.baselines.tolist() == [0.75, 0.75, 0.25, 0.25]


def test_replay_buffer_values_states_by_unstored_continuations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = ("first", "second")
    failed = episode(1, "01", 0.0, snapshots=snapshots, outcome=Outcome.FAILED)
    groups = {
        0: [replace(e, snapshots=snapshots) for e in group(0, 1.0, 0.0)],
        1: [episode(1, "00", 1.0, snapshots=snapshots), failed],
    }
    setup = Setup(tmp_path, monkeypatch, VINE, groups)
    prompts, metrics = setup.sample()
    assert prompts == ["prompt0", "prompt1"] and setup.stored() == []
    assert metrics["vine/episodes"] == 6 and metrics["vine/valued"] == 3  # two a state
    # in example episodes, both of a group were in the same two states: 4 in all, and room for 3 of them
    assert {row["n"] for row in setup.rows} == {1} and {row["turn"] for row in setup.rows} == {0, 1}
    first = [row for row in setup.rows if row["turn"] == 0]
    parents = [json.loads(row["episode"])["id"][-4:] for row in first]
    assert parents == ["0-00", "0-01", "1-00", "1-00"]  # not the one that failed
    sent = {row["turn"]: row["snapshot"] for row in setup.rows}
    assert sent[0] != sent[1] and all(isinstance(text, str) for text in sent.values())
    received = setup.buffer.add_to(ReceivedBatch([groups[1][0], groups[0][1], groups[0][0]], []))
    values = received.experience(Algorithm(AlgorithmConfig.model_validate(VINE))).state_values
    of_group = [sum(row["seed"] % 10 for row in pair) / 2 for pair in (first[:2], first[2:])]
    assert values[:, 0].tolist() == [of_group[1], of_group[0], of_group[0]]
    before = [row["seed"] for row in setup.rows]
    again = Setup(tmp_path / "again", monkeypatch, VINE, groups)
    again.sample()
    assert [row["seed"] for row in again.rows] == before  # they depend on the run's seed and the step only


def test_replay_buffer_raises_for_a_lost_continuation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {i: [replace(e, snapshots=("first", "second")) for e in group(i, 1.0, 0.0)] for i in range(2)}
    setup = Setup(tmp_path, monkeypatch, VINE, groups)

    def lose(rows: Any) -> None:
        setup.submit(rows)
        setup.queue.kv_clear([f"{rows['uid'][3]}_0_0"], "train")
        setup.queue.tags["train"][rows["uid"][3]]["status"] = "failure"

    setup.buffer._submit = lose
    with pytest.raises(RuntimeError, match=r"1 of 6 continuations did not come back.*Error in _run_prompt"):
        setup.sample()


def test_replay_buffer_stores_evaluations_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = Trajectory(Fork(0, 4))
    fork.append([1, 2, 3], Source.PROMPT, 0)
    fork.append_completion(Completion((10, 30), (-0.5, -1.0), FinishReason.STOP, (7, 7)), 1)
    origin = Origin("eval", "eval", 0)
    plain = example_episode("eval-00000-sampled-0000", origin=origin)
    branching = example_episode("eval-00000-sampled-0001", origin=origin, trajectories=(*plain.trajectories, fork))
    failed = example_episode(
        "eval-00000-sampled-0002", origin=origin, trajectories=(), outcome=Outcome.FAILED, rewards=()
    )
    for evaluated in ([plain, branching, failed], [plain, failed]):  # by a run, and again by its resumption
        setup = Setup(tmp_path, monkeypatch, DAPO, {})
        for number, found in enumerate(evaluated):
            setup.queue.finish(f"val{number}", [found], 0, "val")
        batch, metrics = setup.buffer.sample(global_steps=0, partition_id="val", batch_size=len(evaluated))
        assert prompts_of(batch) == [f"val{number}" for number in range(len(evaluated))] and metrics == {}
        assert setup.stored() == [plain.id, branching.id, failed.id]
        setup.store.close()
        setup.metrics.close()
    stored = list(read_episodes(tmp_path))
    assert len(stored[1].trajectories) == 2 and stored[2].outcome is Outcome.FAILED
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["kind"], row["split"], row["sampling"]) == ("eval", "eval", "sampled")
    assert (row["n"], row["failed"]) == (2, 1)  # a failed episode does not count


def test_replay_buffer_passes_plain_batches_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(tmp_path, monkeypatch, {}, {0: group(0, 1.0, 0.0)})
    prompts, metrics = setup.sample(1)
    assert prompts == ["prompt0"] and metrics == {} and setup.stored() == []
    assert setup.buffer.poll_interval == 0.0  # other attributes are verl's


@register("compared-v0")
class Judged(Env):
    """Rewards the longest answer of a group; counts how often it is asked."""

    asked: ClassVar[list[int]] = []

    @group_reward
    def longest(self, group: EpisodeGroup) -> list[float]:
        Judged.asked.append(len(group.episodes))
        lengths = [len(e.final_text) for e in group.episodes]
        return [float(n == max(lengths)) for n in lengths]


@pytest.mark.parametrize("algorithm", [{}, DAPO])
def test_replay_buffer_asks_group_rewards_once(
    algorithm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Judged.asked.clear()
    # equal except the lengths of answers, compared by the group reward
    groups = {
        i: [
            replace(e, env_args={}, messages=(Message("assistant", "x" * (n + 1)),))
            for n, e in enumerate(group(i, 1, 1))
        ]
        for i in range(9)
    }
    setup = Setup(tmp_path, monkeypatch, algorithm, groups, env="compared-v0")
    setup.sample()
    assert setup.rollout.submitted == [2]  # the filters drop none of them
    sampled = ReceivedBatch([*groups[0], *groups[1]], [])
    received = setup.buffer.add_to(sampled)
    assert [e.value("longest") for e in received.episodes] == [0.0, 1.0] * 2
    assert [e.reward for e in received.episodes] == [1.0, 2.0] * 2
    assert Judged.asked == [2, 2]
