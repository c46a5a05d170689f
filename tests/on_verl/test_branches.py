"""Episodes that branch, through verl's rows and back: each sampled token is trained on once, with the same loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from doubles import CALL, UnprovenRenderer, run_dice, sampled, small_renderer
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from agent_rl.algorithms import ScoredRows
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.verl.driver.exchange import compute_weights, prepare
from agent_rl.backends.verl.driver.received import receive
from agent_rl.backends.verl.worker.loss import SENT, WHOLE, loss_function
from agent_rl.core.episode import Episode, Reward, group_episodes
from agent_rl.core.messages import Message
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.policy import TokenPolicy
from on_verl.test_backends_agree import as_engine, gradient, in_verl, preset

UNPROVEN: list[set[int]] = [set(), {1}, {2}, {1, 2, 3}, {1, 3}, {3}]
"""The turns of each episode that begin a new trajectory."""


def branching(number: int, unproven: set[int]) -> tuple[Episode, int]:
    """An episode of four turns, and how many tokens its engine sampled."""
    renderer = small_renderer()
    answer = Message("assistant", str(number))
    replies = [renderer.reply(m) for m in (CALL, CALL, CALL, answer)]
    policy = TokenPolicy(ScriptedEngine(sampled(replies)), UnprovenRenderer(renderer, unproven))
    episode = run_dice(policy)
    rewards = (Reward("correct", float(number % 2)), Reward("step", 0.5 * (number == 3), turn=1))
    steps = tuple(replace(step, state=f"rolled {turn} times") for turn, step in enumerate(episode.steps))
    named = replace(episode, id=f"e{number}", group_id="ab"[number // 3], rewards=rewards, steps=steps)
    return named, sum(map(len, replies))


@pytest.fixture(scope="module")
def played() -> tuple[list[Episode], int]:
    found = [branching(number, unproven) for number, unproven in enumerate(UNPROVEN)]
    episodes = [episode for episode, _ in found]
    assert [len(e.trajectories) for e in episodes] == [1, 2, 2, 4, 3, 2]
    return episodes, sum(sampled for _, sampled in found)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "gigpo", "reinforce_pp", "sapo"])
def test_forked_tokens_are_trained_on_once(name: str, played: tuple[list[Episode], int]) -> None:
    episodes, sampled = played
    algorithm = preset(name)
    data, keys, extra, padding = in_verl(episodes)
    assert len(keys) == sum(len(e.trajectories) for e in episodes) + 1
    data["old_log_probs"] = data["rollout_log_probs"]
    assert sum(int(mask.sum()) for mask in data["response_mask"].unbind()) == sampled
    weighed = compute_weights(algorithm, receive(keys, extra, padding), data)
    sent = weighed.sent
    assert int(sent[WHOLE][0, 0]) == sampled == sum(int(x.sum()) for x in sent[SENT["counted"]].unbind())
    for mask, weights in zip(data["response_mask"].unbind(), sent[SENT["weights"]].unbind(), strict=True):
        assert not weights[~mask.bool()].any()  # no token repeated by a fork

    model = make_model(ModelConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, layers=2, intermediate=64), 432, 0)
    model = model.double()
    x = algorithm.experience(group_episodes(episodes))
    batch, whole = algorithm.compute_weights(x, ScoredRows(x.rows, x.rows.rollout_logprobs))
    scores = score_tokens(model, batch.padded().rows.token_ids)
    theta = batch.rows.grid().flat(scores.logprobs.detach().float(), len(batch.rows.token_ids))
    batch = algorithm.prepare(theta, batch)[0].padded()
    expected_loss = algorithm.loss(scores.logprobs, scores.entropy, batch.inputs, whole).loss
    expected = gradient(expected_loss, model)
    assert float(expected.norm()) > 1e-4

    data.update(sent)
    if algorithm.prepares(weighed.batch):
        assert name == "gspo"
        scored = as_engine([score_tokens(model, ids[None]).logprobs[0].detach() for ids in data["input_ids"].unbind()])
        theta = weighed.by_token(response_from_nested(scored, data["response_mask"]).unbind(), range(len(keys)))
        data.update(prepare(algorithm, weighed, theta, range(len(keys)))[0])
    value, total = 0.0, torch.zeros_like(expected)
    for start in range(0, len(keys), 2):  # micro-batches of verl's own, which part an episode's rows
        part = tu.index_select_tensor_dict(data, list(range(start, min(start + 2, len(keys)))))
        logprobs = as_engine([score_tokens(model, ids[None]).logprobs[0] for ids in part["input_ids"].unbind()])
        tu.assign_non_tensor(part, dp_size=1)
        loss, _ = loss_function(algorithm.config)({"log_probs": logprobs}, part)
        value, total = value + loss.item(), total + gradient(loss, model)
    assert value == pytest.approx(expected_loss.item(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5 * float(expected.norm()))
