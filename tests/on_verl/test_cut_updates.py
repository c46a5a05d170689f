"""Several updates of a step on verl: episodes' rows change nothing, and the updates are the embedded backend's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doubles import example_episode
from pieces import SAMPLED, SCORES, TURN, WIDTH, Pieces
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from agent_rl.algorithms import Algorithm, Rows, ScoredRows
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.backends.embedded.mini_batches import mini_batches
from agent_rl.backends.verl.driver.exchange import reported
from agent_rl.backends.verl.driver.mini_batches import Cut
from agent_rl.backends.verl.worker.loss import loss_function
from agent_rl.config import choices
from agent_rl.core.episode import Episode, Reward, StepRecord, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from on_verl.test_backends_agree import as_engine, nested, preset
from on_verl.test_trainer import Setup

LR = 0.5
UPDATES = UpdatesConfig(minibatches=2, epochs=2, shuffle=False)
NAMES = [name for name in choices("algorithm") if preset(name).config.critic.where != "shared"]


@functools.cache
def algorithm(name: str, *changes: str) -> Algorithm:
    return Algorithm(preset(name, *changes).config.sampled_elsewhere())


def wave(ids: Tensor, seed: int) -> Tensor:
    """Numbers that follow from the token, whichever row it is in."""
    return (1.7 * ids.double() + 3.1 * seed).sin()


def mu(ids: Tensor) -> Tensor:
    return -1 - 0.3 * wave(ids, 0)


def theta(ids: Tensor, w: Tensor) -> Tensor:
    return mu(ids) - 0.1 * wave(ids, 1) + torch.stack([wave(ids, 5 + k) for k in range(4)], -1) @ w


def old(ids: Tensor) -> Tensor:
    return theta(ids, torch.zeros(4, dtype=torch.float64))


OF_TOKENS = {
    "reference_logprobs": lambda ids: mu(ids) - 0.3 * wave(ids, 2),
    "values": lambda ids: wave(ids, 3),
    "sum_pi_squared": lambda ids: 0.5 + wave(ids, 4) / 2,
}


def episode(number: int, cut: Pieces) -> Episode:
    """An episode of three turns that is cut like this; each of its tokens is another."""
    sampled, trajectories = SAMPLED[number % 8], list[Trajectory]()
    delegated = range(*cut.agent) if cut.agent else range(0)
    places = [place for place in cut.after if place <= sampled[-1]]

    def trajectory(shown: Sequence[int], own: range, fork: Fork | None) -> None:
        made = Trajectory(fork)
        if fork is not None and not fork.position:
            made.append(range(900, 900 + (cut.opening or 1)), Source.PROMPT, shown[0] // TURN)
        for at in shown:
            token = torch.tensor(number * WIDTH + at)
            if at in sampled and at in own:
                one = Completion((int(token),), (float(mu(token)),), FinishReason.STOP, (0,))
                made.append_completion(one, at // TURN)
            else:
                made.append([int(token)], Source.ENV, at // TURN)
        trajectories.append(made)

    caller = 0
    for start, stop in zip([0, *places], [*places, WIDTH], strict=True):
        first = 0 if cut.opening is None else start
        repeated = sum(at not in delegated for at in range(first, start))
        fork, caller = Fork(caller, repeated) if start else None, len(trajectories)
        trajectory([at for at in range(first, stop) if at not in delegated], range(start, stop), fork)
        if delegated and start <= delegated.start < stop:
            opened = (cut.opening or 1) if fork is not None and not fork.position else 0
            called_at = opened + delegated.start - first
            trajectory(delegated, delegated, Fork(caller, 0, delegated=True, called_at=called_at))
    rewards = (Reward("correct", SCORES[number % 8]), Reward("step", 0.25, turn=sampled[0] // TURN))
    steps = tuple(StepRecord(1, 0.0, False, False, state=f"s{turn}") for turn in range(3))
    named = {"group_id": "ab"[number // 4 % 2], "trajectories": tuple(trajectories), "rewards": rewards}
    return example_episode(f"e{number:02}", steps=steps, **named)


GREEDY = [replace(episode(20, Pieces()), group_id="a"), replace(episode(21, Pieces()), group_id="b")]
VALUES = {f"e{number:02}": wave(torch.arange(3), number) for number in range(8)}


def embedded(ours: Algorithm, episodes: list[Episode], target_kl: float = torch.inf) -> Tensor:
    """The parameters after each update of the embedded backend's."""
    x = ours.experience(group_episodes(episodes, GREEDY if ours.needs_greedy else ()))
    if ours.needs_values:
        x = replace(x, state_values=torch.stack([VALUES[e.id] for e in episodes]))

    def of(rows: Rows, function: Any) -> Tensor:
        return torch.where(rows.loss_mask, function(rows.token_ids), 0.0).float()

    first = of(x.rows, old) if ours.recomputes_old else x.rows.rollout_logprobs
    scored = ScoredRows(x.rows, first, **{name: of(x.rows, f) for name, f in OF_TOKENS.items()})
    weighed, _, wanted = ours.compute_weights_in_place_order(x, scored)
    batch, w, found = weighed.select(torch.nonzero(wanted)[:, 0]), torch.zeros(4, dtype=torch.float64), []
    for part in mini_batches(weighed, wanted, batch, UPDATES, 0, 0):
        prepared = ours.prepare(theta(part.batch.rows.token_ids, w), part.batch)[0].padded()
        leaf = w.clone().requires_grad_()
        logprobs = theta(prepared.rows.token_ids, leaf)
        terms = ours.loss(logprobs, torch.zeros_like(logprobs), prepared.inputs, part.whole)
        if found and terms.sums["old_kl"] / int(prepared.rows.loss_mask.sum()) > target_kl:
            break
        w = w - LR * torch.autograd.grad(terms.loss, leaf)[0]
        found.append(w)
    return torch.stack(found)


class Policy:
    """verl's workers, with a policy of four parameters and micro-batches of two rows."""

    def __init__(self, ours: Algorithm, queue: Any) -> None:
        self.algorithm, self.queue, self.w = ours, queue, torch.zeros(4, dtype=torch.float64)
        self.found: list[Tensor] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        rows = [theta(ids, self.w) for ids in self.queue.of("input_ids", batch.keys).unbind()]
        fields = TensorDict({"log_probs": as_engine(rows)}, len(rows))
        self.queue.kv_batch_put(batch.keys, "train", fields)

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        names = [name for name in self.queue.columns if name != "extra_fields"]
        data = TensorDict({name: self.queue.of(name, batch.keys) for name in names}, len(batch))
        slope = torch.zeros(4, dtype=torch.float64)
        for start in range(0, len(batch), 2):
            part = tu.index_select_tensor_dict(data, list(range(start, min(start + 2, len(batch)))))
            tu.assign_non_tensor(part, dp_size=1)
            leaf = self.w.clone().requires_grad_()
            engine = {"log_probs": as_engine([theta(ids, leaf) for ids in part["input_ids"].unbind()])}
            engine["entropy"] = torch.zeros_like(engine["log_probs"])
            loss, _ = loss_function(self.algorithm.config)(engine, part)
            slope += torch.autograd.grad(loss, leaf)[0]
        self.w = self.w - LR * slope
        self.found.append(self.w)
        return {"metrics": {"mfu": [0.5]}}


def on_verl(
    ours: Algorithm,
    episodes: list[Episode],
    folder: Path,
    patch: pytest.MonkeyPatch,
    target_kl: float | None = None,
) -> Tensor:
    """The parameters after each update of verl's."""
    made = Setup(ours, folder, patch, episodes)
    made.trainer.config.data.agent_rl.target_kl = target_kl
    ids = made.queue.columns["responses"].unbind()
    for name, function in {"old_logprobs": old if ours.recomputes_old else mu, **OF_TOKENS}.items():
        made.queue.columns[COMPUTED[name]] = nested([function(row).tolist() for row in ids], torch.float32)
    found = Policy(ours, made.queue)
    made.trainer.actor_rollout_wg, made.trainer.config.actor_rollout_ref.actor.ppo_epochs = found, UPDATES.epochs
    asked = {"greedy": GREEDY if ours.needs_greedy else (), "values": VALUES if ours.needs_values else {}}
    made.trainer.replay_buffer = SimpleNamespace(add_to=lambda received: replace(received, **asked))
    keys = sorted(key for key, tag in zip(made.batch.keys, made.batch.tags, strict=True) if not tag["is_padding"])
    cut = Cut.of(keys, {(prompt := key.split("_")[0]): prompt for key in keys}, UPDATES, 1)
    cut.sizes[0] += 1  # verl's padding
    made.trainer.mini_batch_of = cut.numbers(made.batch.keys)
    made.trainer.local_trigger_step = 1  # theta is scored before the first update, too
    made.step("_compute_advantage", "_update_actor")
    return torch.stack(found.found)


COMPUTED = {"old_logprobs": "old_log_probs", "reference_logprobs": "ref_log_prob"} | {
    name: name for name in ("values", "sum_pi_squared")
}


OPSM = "negative_mask={name: opsm, delta: 0.01}"
CHANGED = [("grpo", OPSM), ("gspo", OPSM), ("m2po", OPSM)]


@pytest.mark.parametrize("chosen", [*((name,) for name in NAMES), *CHANGED], ids=" ".join)
def test_cutting_episodes_changes_no_update_on_verl(
    chosen: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ours = chosen[0], algorithm(*chosen)
    expected = embedded(ours, [episode(number, Pieces()) for number in range(8)])
    assert float(expected.diff(dim=0).abs().max()) > 1e-5
    for seed in range(3):
        random, folder = np.random.default_rng([len(name), seed]), tmp_path / str(seed)
        folder.mkdir()
        episodes = [episode(number, Pieces.drawn(random)) for number in range(8)]
        assert max(len(e.trajectories) for e in episodes) > 2
        assert any(t.is_delegated for e in episodes for t in e.trajectories)
        torch.testing.assert_close(embedded(ours, episodes), expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(on_verl(ours, episodes, folder, monkeypatch), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["grpo", "m2po"])  # m2po scores theta for itself, too
def test_target_kl_stops_updates_on_both_backends_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes, taken = [episode(number, Pieces([4] if number == 2 else [])) for number in range(8)], list[int]()
    for limit in (0.01, 0.1):
        (folder := tmp_path / str(limit)).mkdir()
        expected = embedded(algorithm(name), episodes, limit)
        torch.testing.assert_close(
            on_verl(algorithm(name), episodes, folder, monkeypatch, limit), expected, rtol=0, atol=2e-6
        )
        taken.append(len(expected))
    assert taken == [1, 4]


def test_reported_puts_the_worker_before_a_name_once() -> None:
    updates: list[Any] = [
        {"metrics": {"critic/vf_loss": [loss], "grad_norm": [2.0], "mfu": [0.5]}} for loss in (1.0, 3.0)
    ]
    assert reported(updates, "critic") == {"critic/vf_loss": 2.0, "critic/grad_norm": 2.0, "perf/mfu/critic": 0.5}
