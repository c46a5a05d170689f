"""Parts of an algorithm that need more than scores, through `Algorithm`: baselines by step, masks, prompts, lengths."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from agent_rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Denominators,
    Experience,
    WeightedRows,
    collate,
)
from agent_rl.algorithms.advantages.episode import batch_normalised
from agent_rl.algorithms.aggregation import shares_of_prompts
from agent_rl.algorithms.diagnostics import tool_error_metrics
from agent_rl.algorithms.explain import explain
from agent_rl.algorithms.samples import Sample
from agent_rl.core.episode import Episode, Reward, group_episodes
from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Source
from agent_rl.errors import ConfigError
from tests.batches import by_row, flat, scored, weigh, weighted
from tests.doubles import example_episode, example_sample
from tests.tensors import aggregate

PLAIN = {"name": "group-relative", "std": False}


def episode(name: str, value: float | None, group: str = "a", **changes: object) -> Episode:
    return example_episode(name, rewards=(Reward("r", value),), group_id=group, **changes)


def made(algorithm: Algorithm, values: list[float | None], samples: list[Sample], groups: str) -> Experience:
    """Return an experience of episodes that scored `values`, with the tokens of `samples`."""
    x = algorithm.experience(
        group_episodes([episode(str(i), v, g) for i, (v, g) in enumerate(zip(values, groups, strict=True))])
    )
    return replace(x, rows=collate(samples), lengths=torch.tensor([int(s.loss_mask.sum()) for s in samples]))


# optimal-baseline


def stepwise(**knobs: object) -> WeightedRows:
    """Rows with first and second tokens at different places; the third row has one token more."""
    algorithm = Algorithm(AlgorithmConfig(advantage={"name": "optimal-baseline", **knobs}, proximal="recompute"))
    places = [[1, 3], [1, 2], [1, 2, 3]]
    samples = [example_sample(4, p, reward=(1, 0, 9)[e], episode=e) for e, p in enumerate(places)]
    x = made(algorithm, [1.0, 0.0, None], samples, "aaa")
    pi = torch.tensor([[1, 0.5, 1, 0.25], [1, 0.25, 0.5, 1], [1, 0.1, 0.1, 0.1]])
    squares = torch.tensor([[7, 0.5, 7, 0.375], [7, 0.25, 0.3, 7], [7, 0.9, 0.9, 0.9]])
    old = torch.where(by_row(x.rows, x.rows.loss_mask), pi.log(), torch.nan)
    batch, whole = weigh(algorithm, x, old_logprobs=old, sum_pi_squared=squares)
    assert whole == Denominators(4, 2)  # the unscored row does not count
    return batch


def test_optimal_baseline_by_hand():
    # W: 1 - 2 pi + sum pi^2 summed up: .5, 1.375 and .75, 1.05; returns 1 and 0
    first, second = 0.5 / 1.25, 1.375 / 2.425
    expected = torch.tensor([[0, 1 - first, 0, 1 - second], [0, -first, -second, 0]])
    torch.testing.assert_close(stepwise().advantages, expected)


def test_optimal_baseline_discounts_by_sampled_token():
    # returns .5, 1 and 0, 0
    first, second = 0.5 * 0.5 / 1.25, 1.375 / 2.425
    expected = torch.tensor([[0, 0.5 - first, 0, 1 - second], [0, -first, -second, 0]])
    torch.testing.assert_close(stepwise(gamma=0.5).advantages, expected)


@pytest.mark.parametrize(("zero_tail", "last"), [(True, 1.0), (False, 0.0)])
def test_optimal_baseline_at_a_single_row_step(zero_tail, last):
    advantage = {"name": "optimal-baseline", "zero_tail": zero_tail}
    algorithm = Algorithm(AlgorithmConfig(advantage=advantage, proximal="recompute", objective="reinforce"))
    samples = [example_sample(3, [1, 2], reward=1, episode=0), example_sample(3, [1], reward=0, episode=1)]
    x = made(algorithm, [1.0, 0.0], samples, "aa")
    batch, _ = weigh(algorithm, x, sum_pi_squared=torch.ones_like(x.rows.rewards))
    assert batch.advantages[0, 2].item() == last


def test_optimal_baseline_compares_episodes_within_groups():
    algorithm = Algorithm(AlgorithmConfig(advantage="optimal-baseline", proximal="recompute"))
    samples = [example_sample(2, [1], reward=v, seed=v, episode=e) for e, v in ((0, 0), (0, 1), (1, 0))]
    x = algorithm.experience(group_episodes([episode("fork", 1.0), episode("loss", 0.0)]))
    x = replace(x, rows=collate(samples))
    half = torch.full_like(x.rows.rewards, math.log(0.5))  # equal weights
    squares = torch.ones_like(half)
    batch, _ = weigh(algorithm, x, old_logprobs=half, sum_pi_squared=squares)
    assert batch.advantages[:, 1].tolist() == [0.5, 1.0, -0.5]  # the fork's second row is its second step


# OPSM

OLD = torch.tensor([[0, -1, -1, 0], [0, -1, -1, -1], [0, -1, -1, 0]], dtype=torch.float32)
MOVED = torch.tensor([[0, -1.3, -1, 0], [0, -1.6, -1, -0.6], [0, -3, -3, 0]], dtype=torch.float32)
"""Rows whose log(mu / theta) is .15, .0667 and 2 in the mean; the last one is good."""


def masked(**settings: object) -> tuple[Algorithm, WeightedRows, Denominators]:
    algorithm = Algorithm(AlgorithmConfig(objective="reinforce", aggregation="token-mean", **settings))
    samples = [example_sample(4, p, episode=e) for e, p in enumerate([[1, 2], [1, 2, 3], [1, 2]])]
    rows = replace(collate(samples), rollout_logprobs=OLD.flatten())
    advantages = torch.where(by_row(rows, rows.loss_mask), torch.tensor([[-1.0], [-2.0], [3.0]]), 0.0)
    return algorithm, weighted(scored(rows, reference_logprobs=OLD), advantages=advantages), Denominators(7, 3)


def loss_of(
    algorithm: Algorithm, batch: WeightedRows, whole: Denominators
) -> tuple[float, torch.Tensor, dict[str, float]]:
    batch = batch.padded()
    theta = MOVED[batch.rows.episode][:, : batch.rows.token_ids.shape[1]].clone().requires_grad_()
    terms = algorithm.loss(theta, torch.zeros_like(theta), batch.inputs, whole)
    terms.loss.backward()
    assert theta.grad is not None
    return terms.loss.item(), theta.grad, terms.sums


def test_opsm_masks_bad_rows_and_counts_them():
    loss, grad, sums = loss_of(*masked(negative_mask={"name": "opsm", "delta": 0.1}))
    # -A log theta of the second and the third row, over all 7 tokens
    assert loss == pytest.approx((2 * (-1.6 - 1 - 0.6) - 3 * (-3 - 3)) / 7)
    assert grad[0].tolist() == [0, 0, 0, 0] and grad[1, 1].item() == pytest.approx(2 / 7)
    assert sums["masked_fraction"] == 2  # tokens
    loss, _, sums = loss_of(*masked(negative_mask={"name": "opsm", "delta": 0.05}))
    assert loss == pytest.approx(-3 * (-3 - 3) / 7) and sums["masked_fraction"] == 5
    assert "masked_fraction" not in loss_of(*masked())[2]


def test_opsm_keeps_penalties_of_masked_rows():
    kl = {"where": "loss", "coefficient": 0.5, "kind": "k2"}
    algorithm, batch, whole = masked(negative_mask={"name": "opsm", "delta": 0.1}, kl=kl)
    _, grad, _ = loss_of(algorithm, batch, whole)
    assert grad[0, 1].item() == pytest.approx(0.5 * -0.3 / 7)


def test_opsm_does_not_depend_on_the_cut():
    algorithm, batch, whole = masked(negative_mask={"name": "opsm", "delta": 0.1})
    parts = [loss_of(algorithm, batch.select([row]), whole) for row in range(3)]
    loss, grad, sums = loss_of(algorithm, batch, whole)
    assert sum(p[0] for p in parts) == pytest.approx(loss)
    assert sum(p[2]["masked_fraction"] for p in parts) == sums["masked_fraction"]
    for row, part in enumerate(parts):
        assert part[1][0].tolist() == grad[row, : part[1].shape[1]].tolist()


def test_opsm_is_explained():
    text = explain(AlgorithmConfig(negative_mask={"name": "opsm", "delta": 0.25}))
    assert "opsm (delta=0.25)" in text and "mean_t log(mu/theta) > delta" in text


# Prompts and the batch

COUNTED = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)


def test_prompt_mean_by_hand_in_any_cut():
    shares = shares_of_prompts(COUNTED.sum(-1), torch.tensor([5, 5, 2, 9]))  # 4 tokens and 2; the third prompt has none
    assert shares.tolist() == [1 / 8, 1 / 8, 1 / 4, 0]
    loss = torch.where(COUNTED, torch.tensor([[1.0, 2, 3, 6], [4] * 4, [8, 0, 0, 2], [1] * 4]), torch.nan)
    whole = Denominators.of(COUNTED)
    assert aggregate("prompt-mean", loss, COUNTED, whole, shares).item() == pytest.approx(
        ((2 + 3 + 6 + 4) / 4 + (8 + 2) / 2) / 2
    )
    one = [slice(r, r + 1) for r in range(4)]
    parts = [aggregate("prompt-mean", loss[r], COUNTED[r], whole, shares[r]).item() for r in one]
    assert parts == pytest.approx([11 / 8, 4 / 8, 10 / 4, 0])
    with pytest.raises(ConfigError, match="'prompt-mean' reads prompt_shares, which were not computed"):
        aggregate("prompt-mean", loss, COUNTED, whole)
    assert shares_of_prompts(COUNTED[3:].sum(-1), torch.tensor([9])).tolist() == [0]


@pytest.mark.parametrize(("count", "share"), [(False, 1 / 8), (True, 1 / 16)])
def test_prompt_mean_skips_prompts_without_tokens(count, share):
    algorithm = Algorithm(AlgorithmConfig(aggregation="prompt-mean", advantage=PLAIN, count_zero_advantage=count))
    values = {"win": (1.0, "a"), "loss": (0.0, "a"), "tie": (1.0, "b"), "too": (1.0, "b"), "none": (None, "c")}
    x = algorithm.experience(group_episodes([episode(name, *value) for name, value in values.items()]))
    batch, _ = weigh(algorithm, x)  # 8 sampled tokens a prompt
    assert batch.prompt_shares.tolist() == [share, share]


def test_batch_normalised_by_hand():
    scores = torch.tensor([1.0, 0.0, 3.0, 1.0, math.nan, 7.0])
    groups, everything = torch.tensor([0, 0, 1, 1, 1, 2]), torch.ones(6, dtype=torch.bool)
    centred = torch.tensor([0.5, -0.5, 1.0, -1.0, math.nan, 0.0], dtype=torch.float64)
    got = batch_normalised(scores, groups, everything, eps=0.0)
    torch.testing.assert_close(got, centred / math.sqrt(2.5 / 4), equal_nan=True)
    got = batch_normalised(scores, groups, groups == 0, eps=0.0)  # the others are not trained on
    torch.testing.assert_close(got, centred / math.sqrt(0.5), equal_nan=True)
    assert batch_normalised(torch.ones(3), torch.zeros(3), everything[:3]).tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="kept"):
        batch_normalised(scores, groups, everything[:2])


# Lengths; each episode has 4 sampled tokens


def shaped(tasks: list[dict[str, object]], **knobs: object) -> list[float]:
    algorithm = Algorithm(AlgorithmConfig(shaping=[knobs]))
    return algorithm.experience(
        group_episodes([episode(str(i), 1.0, task=t) for i, t in enumerate(tasks)])
    ).scores.tolist()


def test_length_l1_uses_the_target_of_tasks():
    tasks = [{"n": 7}, {"n": 1.5}, {"n": None}]
    assert shaped(tasks, name="length-l1", target="n", alpha=0.1) == pytest.approx([0.7, 0.75, 1.0])
    got = shaped(tasks, name="length-l1-max", target="n", alpha=0.1, delta=0.5)
    assert got == pytest.approx([0.8, 0.25, 1.0])
    assert shaped([{}, {}], name="length-l1", target=6, alpha=0.1) == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize(("task", "found"), [({"m": 3}, "is none of m"), ({}, "no keys"), ({"n": "7"}, "is '7'")])
def test_length_l1_requires_a_target_in_tasks(task, found):
    with pytest.raises(ConfigError, match=rf"length target 'n' .*{found}.* in task"):
        shaped([{"n": 7}, task], name="length-l1", target="n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "optimal-baseline", "proximal": "rollout"}, "set proximal=auto or recompute"),
        ({"negative_mask": "opsm"}, "delta: field required"),
        ({"negative_mask": {"name": "opsm", "delta": 0}}, "delta=0: input should be greater than 0"),
        ({"shaping": ["length-l1"]}, "target: field required"),
        ({"shaping": [{"name": "length-l1", "target": 0}]}, "target"),
    ],
)
def test_algorithm_parts_refuse_meaningless_settings(settings, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**settings)


# Metrics


def test_diagnose_splits_the_gap_by_source():
    algorithm = Algorithm(AlgorithmConfig(proximal="recompute"))
    x = made(algorithm, [1.0, 0.0], [example_sample(6, [1, 2, 5], episode=0), example_sample(3, [2], episode=1)], "aa")
    prompt, policy, env, template = range(len(Source))
    sources = torch.tensor([[prompt, policy, policy, template, env, policy], [prompt, template, policy, -1, -1, -1]])
    old = x.rows.rollout_logprobs + flat(x.rows, torch.tensor([[0, 0.1, -0.2, 0, 0, 0.4], [0, 0, -0.8, 0, 0, 0]]))
    found = algorithm.diagnose(
        x := replace(x, rows=replace(x.rows, sources=flat(x.rows, sources))), scored(x.rows, old_logprobs=old)
    )
    by_source = {k.removeprefix("mismatch/source_"): v for k, v in found.items() if "source" in k}
    assert by_source == pytest.approx({"prompt": 0.1, "policy": 0.2, "env": 0.4, "template": 0.8}, rel=1e-5)


def test_diagnose_reports_token_ages_without_rescoring():
    algorithm = Algorithm(AlgorithmConfig())
    x = algorithm.experience(group_episodes([episode("a", 1.0)]))
    found = algorithm.diagnose(x, scored(x.rows))  # versions 7, 7, 7, 8
    assert found == {f"policy_version/staleness_{n}": v for n, v in zip("0123", (0.25, 0.75, 0, 0), strict=True)} | {
        "policy_version/staleness_4+": 0
    }


def test_failed_tool_calls_by_hand():
    advantages, errors = torch.tensor([1.0, -1.0, 0.0, 9.0]), torch.tensor([0, 2, 1, 5])
    found = tool_error_metrics(advantages, errors, torch.tensor([True, True, True, False]))
    names = ("with_tool_errors", "without_tool_errors", "tool_error_correlation")
    assert found == pytest.approx({f"advantage/{n}": v for n, v in zip(names, (-0.5, 1.0, -1.0), strict=True)})
    none = tool_error_metrics(advantages, errors * 0, torch.ones(4, dtype=torch.bool))
    assert none == {"advantage/without_tool_errors": 2.25}
    assert tool_error_metrics(advantages, errors, errors > 9) == {}


def test_failed_tool_calls_are_counted_in_episodes():
    clean = tuple(m if m.role != "tool" else Message("tool", "49") for m in example_episode().messages)
    algorithm = Algorithm(AlgorithmConfig(advantage=PLAIN))
    changed = {"win": (1.0, clean), "loss": (0.0, example_episode().messages), "none": (None, clean)}
    x = algorithm.experience(group_episodes([episode(name, value, messages=m) for name, (value, m) in changed.items()]))
    assert x.tool_errors.tolist() == [0, 1, 0]
    batch, _ = algorithm.compute_weights(x, scored(x.rows))
    expected = {"with_tool_errors": -0.5, "without_tool_errors": 0.5, "tool_error_correlation": -1.0}
    assert algorithm.advantage_metrics(x, batch) == pytest.approx({f"advantage/{k}": v for k, v in expected.items()})
