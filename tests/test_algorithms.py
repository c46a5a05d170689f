"""agent_rl.algorithms: advantages, objectives, aggregation, corrections, filters, and batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Batch, Denominators, collate, micro_batches, to_samples
from agent_rl.algorithms.advantages import group_relative
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.algorithms.corrections import CORRECTIONS
from agent_rl.algorithms.filters import informative
from agent_rl.algorithms.objectives import ppo_clip
from agent_rl.types import Outcome, Reward
from tests.doubles import example_episode, example_sample

# Advantages


def test_group_relative_by_hand():
    # group a: mean .5, standard deviation sqrt(4 * .25 / 3); group b: mean 2, standard deviation sqrt(2)
    got = group_relative([1, 3, 0, 0, 1, 1], list("abaaab"))
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    assert got == pytest.approx([a, b, -a, -a, a, -b], rel=1e-12)
    assert group_relative([1, 3, 0, 0, 1, 1], list("abaaab"), std=False) == [0.5, 1, -0.5, -0.5, 0.5, -1]


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 3, [85.66477024459854] * 3, [0.7, None], [0, 0, 0, 0]])
def test_with_nothing_to_compare_with_the_advantage_is_zero(rewards, std):
    got = group_relative(rewards, ["g"] * len(rewards), std=std)
    assert [a is None for a in got] == [r is None for r in rewards]
    assert {a for a in got if a is not None} == {0.0}


def test_what_is_not_scored_leaves_its_group_s_baseline():
    assert group_relative([1, None, 0], list("ggg"), std=False) == [0.5, None, -0.5]
    assert group_relative([None, None], list("gg")) == [None, None]
    assert group_relative([], []) == []
    with pytest.raises(ValueError, match="zip"):
        group_relative([1.0], [])


grouped = st.lists(st.tuples(st.integers(-50, 50), st.sampled_from("abc")), min_size=1, max_size=12)


@given(grouped, st.integers(-1000, 1000), st.floats(0.01, 100))
def test_a_baseline_takes_out_shift_and_the_deviation_takes_out_scale(pairs, shift, scale):
    rewards, groups = [float(r) for r, _ in pairs], [g for _, g in pairs]
    got = np.array(group_relative(rewards, groups))
    np.testing.assert_allclose(group_relative([r + shift for r in rewards], groups), got, atol=1e-9)
    scaled = group_relative([r * scale for r in rewards], groups)
    np.testing.assert_allclose(scaled, got, rtol=1e-3, atol=1e-9)  # the epsilon beside the deviation
    plain = group_relative([r * scale for r in rewards], groups, std=False)
    np.testing.assert_allclose(plain, np.array(group_relative(rewards, groups, std=False)) * scale, atol=1e-9)


@given(grouped)
def test_the_advantages_of_a_group_sum_to_zero(pairs):
    groups = [g for _, g in pairs]
    for std in (True, False):
        got = group_relative([r for r, _ in pairs], groups, std=std)
        for group in set(groups):
            assert sum(a for a, g in zip(got, groups, strict=True) if g == group and a is not None) == pytest.approx(
                0, abs=1e-9
            )


def test_filters_keep_what_can_teach():
    advantages = [0.5, None, 0.0, 1e-9, -0.2]
    assert informative(advantages) == [0, 4]
    assert informative(advantages, drop_zero=False) == [0, 2, 3, 4]
    ties = group_relative([0.1 + 0.2, 0.3, 0.3], list("ggg"))  # equal but for rounding
    assert informative(ties) == []


# Objective


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1, 1.0, -1.0, -1.0),
        (1, 1.28 - 1e-9, -1.28, -1.28),
        (1, 1.28 + 1e-9, -1.28, 0.0),
        (1, 1.5, -1.28, 0.0),
        (1, 0.5, -0.5, -0.5),  # worse than before: never clipped
        (-1, 0.8 + 1e-9, 0.8, 0.8),
        (-1, 0.8 - 1e-9, 0.8, 0.0),
        (-1, 0.1, 0.8, 0.0),
        (-1, 1.5, 1.5, 1.5),
        (-2, 1.1, 2.2, 2.2),
        (0, 3.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(advantage, ratio, loss, slope):
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    token = ppo_clip(new, old, torch.full_like(old, advantage), clip_low_eps=0.2, clip_high_eps=0.28)
    token.loss.sum().backward()
    assert token.loss.item() == pytest.approx(loss, abs=1e-8)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(slope, abs=1e-8)
    assert token.clipped.item() is (slope == 0 and advantage != 0)
    assert token.ratio.item() == pytest.approx(ratio)


@pytest.mark.parametrize("gap", [-1e4, 1e4, -math.inf, math.inf])
def test_an_absurd_ratio_stays_finite(gap):
    old = torch.tensor([[-1.0]])
    new = (old + gap).requires_grad_()
    for advantage in (-1.0, 1.0):
        token = ppo_clip(new, old, torch.tensor([[advantage]]), clip_low_eps=0.2, clip_high_eps=0.28)
        (slope,) = torch.autograd.grad(token.loss.sum(), new)
        assert torch.isfinite(token.loss).all()
        assert torch.isfinite(slope).all()


def test_corrections_by_hand():
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0]], requires_grad=True)
    mu = torch.tensor([[-1.0, -1.5, -0.5, -3.0, -200.0]])
    none, tis = (CORRECTIONS[name](old, mu, cap=2.0) for name in ("none", "token-tis"))
    assert none.tolist() == [[1.0] * 5]
    np.testing.assert_allclose(tis.numpy(), [[1, math.exp(0.5), math.exp(-0.5), 2, 2]], rtol=1e-6)
    assert not tis.requires_grad


# Aggregation

NAN = math.nan
LOSS = torch.tensor([[1.0, 2.0, 3.0, NAN], [10.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
MASK = ~LOSS.isnan()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token-mean", 16 / 4), ("seq-mean-token-sum", (6 + 10) / 2), ("seq-mean-token-mean", (2 + 10) / 2)],
)
def test_aggregation_by_hand_and_nothing_leaks_from_outside_the_mask(name, expected):
    loss = LOSS.clone().requires_grad_()
    got = AGGREGATIONS[name](loss, MASK, Denominators(4, 2))
    assert got.item() == pytest.approx(expected)
    got.backward()
    assert loss.grad is not None
    assert (loss.grad[~MASK] == 0).all()
    assert (loss.grad[MASK] != 0).all()


def test_denominators_count_what_was_sampled():
    samples = [example_sample(5, [2, 3, 4]), example_sample(3, [1]), example_sample(4, [])]
    assert Denominators.of(samples) == Denominators(tokens=4, sequences=2)
    assert Denominators.of([]) == Denominators(1, 1)


# Batches


def test_an_episode_s_advantage_falls_on_its_sampled_tokens():
    (s,) = to_samples([example_episode()], [0.5])
    assert s.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2 + [False]
    assert s.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0]
    np.testing.assert_array_equal(s.rollout_logprobs, np.float32([0, 0, 0, -0.5, -0.0625, 0, 0, -0.1, -2.5, 0]))
    assert (s.episode_id, s.group_id) == ("e0", "g0")


def test_episodes_become_samples_by_their_groups():
    def scored(name: str, value: float | None, group: str, **changes: object):
        return example_episode(name, rewards=(Reward("r", value),), group_id=group, **changes)

    episodes = [
        scored("win", 1.0, "a"),
        scored("loss", 0.0, "a"),
        scored("unscored", None, "a"),
        scored("lost", 1.0, "a", outcome=Outcome.FAILED),
        scored("tie", 1.0, "b"),
        scored("too", 1.0, "b"),
    ]
    for counted in (True, False):
        config = AlgorithmConfig(advantage_std=False, count_zero_advantage=counted)
        samples, whole = Algorithm(config).samples(episodes)
        assert [(s.episode_id, s.advantages.max(), s.advantages.min()) for s in samples] == [
            ("win", 0.5, 0.0),
            ("loss", 0.0, -0.5),
        ]
        # the ties have no gradient; whether they count is the config's choice, the unscored and the lost never do
        assert whole == Denominators(tokens=16 if counted else 8, sequences=4 if counted else 2)


def test_collate_pads_on_the_right():
    batch = collate([example_sample(3, [2]), example_sample(5, [1, 4])], pad_id=9)
    assert len(batch) == 2
    assert batch.token_ids[0, 3:].tolist() == [9, 9]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 0, 0, 1]]
    assert batch.lengths.tolist() == [3, 5]
    assert batch.token_ids.dtype == torch.int64
    assert (batch.rollout_logprobs[~batch.loss_mask] == 0).all()


@given(st.lists(st.integers(1, 40), max_size=15), st.integers(1, 200), st.randoms())
def test_cutting_drops_nothing_keeps_the_budget_and_hangs_on_no_order(lengths, budget, random):
    samples = [example_sample(n, [n - 1], seed=i) for i, n in enumerate(lengths)]
    cut = micro_batches(samples, budget)
    assert sorted(s.episode_id for b in cut for s in b) == sorted(s.episode_id for s in samples)
    assert all(len(b) == 1 or len(b) * max(len(s.token_ids) for s in b) <= budget for b in cut)
    shuffled = random.sample(samples, len(samples))
    again = micro_batches(shuffled, budget)
    assert [[len(s.token_ids) for s in b] for b in again] == [[len(s.token_ids) for s in b] for b in cut]


# Loss


def test_what_is_reported_by_hand():
    mu = torch.tensor([[0.0, -1.0, -2.0, 0.0]])
    mask = torch.tensor([[False, True, True, False]])
    batch = Batch(torch.zeros(1, 4, dtype=torch.int64), mask, mu, mask.float(), torch.tensor([4]))
    new = torch.tensor([[5.0, -1.0 + math.log(2), -2.5, 5.0]], requires_grad=True)
    terms = Algorithm(AlgorithmConfig()).loss(new, mu, batch, Denominators(2, 1))
    assert terms.loss.item() == pytest.approx(-(1.28 + math.exp(-0.5)) / 2)
    assert terms.sums == pytest.approx(
        {
            "ratio": 2 + math.exp(-0.5),
            "clip_fraction": 1.0,
            "rollout_gap": math.log(2) + 0.5,
            "rollout_kl": (2 - 1 - math.log(2)) + (math.exp(-0.5) - 1 + 0.5),
        },
        rel=1e-6,
    )


def test_a_correction_weighs_each_token_s_loss():
    mu, old, new = (torch.tensor([[0.0, a, b]]) for a, b in ((-2.0, -1.0), (-1.0, -1.5), (-0.9, -1.5)))
    mask = torch.tensor([[False, True, True]])
    batch = Batch(torch.zeros(1, 3, dtype=torch.int64), mask, mu, mask.float(), torch.tensor([3]))
    algorithm = Algorithm(AlgorithmConfig(correction="token-tis", correction_cap=2.0))
    terms = algorithm.loss(new, old, batch, Denominators(2, 1))
    assert terms.loss.item() == pytest.approx(-(2.0 * math.exp(0.1) + math.exp(-0.5)) / 2)


@pytest.mark.parametrize("bad", [{"clip_low_eps": 0}, {"clip_low_eps": 1.1}, {"aggregation": "mean"}, {"clip": 0.2}])
def test_a_config_without_a_meaning_is_refused(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        AlgorithmConfig(**bad)
