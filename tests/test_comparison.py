"""agent_rl.rollout.comparison: pass@k, pass^k, and two rollouts on the same tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_rl as ar
from agent_rl.rollout.comparison import compare, compare_means, pass_at_k, pass_hat_k, pass_rates
from tests.doubles import example_episode


def episodes(*tasks: Sequence[float | None]) -> list[ar.Episode]:
    """Return the samples of each task, by what they earned."""
    return [
        example_episode(f"{task}-{i}", task={"n": task}, rewards=(ar.Reward("correct", value),))
        for task, values in enumerate(tasks)
        for i, value in enumerate(values)
    ]


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_estimates_are_means_over_all_choices(samples: list[bool], k: int) -> None:
    if k > len(samples):
        return
    chosen = list(combinations(samples, k))
    assert pass_at_k(sum(samples), len(samples), k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_hat_k(sum(samples), len(samples), k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_pass_rates_leave_tasks_with_few_samples_out() -> None:
    found = pass_rates(episodes([1, 0, 0], [1, 1, 1], [0, None, 1], [0]), 2)
    assert found == (pytest.approx((2 / 3 + 1 + 1) / 3), pytest.approx((0 + 1 + 0) / 3))
    assert all(map(math.isnan, pass_rates(episodes([1], [0]), 2)))


def test_compare_pairs_by_task() -> None:
    success, reward = compare(episodes([0, 0], [1], [0], [1], [1]), reversed(episodes([1, 0], [1], [1], [None], [])))
    assert (success.tasks, success.only_first, success.only_second) == (3, 2, 0)
    assert (success.first, success.second) == (pytest.approx(1 / 3), pytest.approx(5 / 6))
    assert success.difference == pytest.approx(0.5) and success.measure == "success"
    assert success.interval[0] >= 0 and success.interval[1] <= 1
    assert success.p == 0.5  # of the signs (+, +), (+, -), (-, +), (-, -) of two tasks, the first and the last
    assert reward.difference == pytest.approx(0.5)


@pytest.mark.parametrize("n", [10, 40])
def test_compare_tells_a_difference_from_chance(n: int) -> None:
    better, _ = compare(episodes(*[[0]] * n), episodes(*[[1]] * n))
    assert better.p < 0.01 and better.interval == (1, 1)
    same, _ = compare(episodes(*[[0], [1]] * n), episodes(*[[1], [0]] * n))
    assert same.p == pytest.approx(1, abs=0.01) and same.interval[0] < 0 < same.interval[1]
    equal, _ = compare(episodes(*[[0]] * n), episodes(*[[0]] * n))
    assert equal.p == 1 and equal.interval == (0, 0)


def test_p_of_large_values_counts_what_was_seen() -> None:
    tokens = [8603.280605772534, 5217.21480021407, 2730.9915147849097, 2309.572530395324]
    tokens += [5229.034882371091, 8138.9974954886575, 425.79999534423376, 851.6640767847728]
    found = compare_means("tokens", {str(n): 0.0 for n in range(8)}, {str(n): each for n, each in enumerate(tokens)})
    assert found is not None and found.p == 2 / 2**8  # all signs up, or all down; their sums differ in the last digit


def test_compare_of_other_tasks_is_refused() -> None:
    with pytest.raises(ar.ConfigError, match="no task in common"):
        compare(episodes([1]), episodes([None], [1]))
