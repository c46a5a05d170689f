"""agent_rl.rollout.evaluation: rates with their intervals, and means without failures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.episode import Outcome, Reward, StopReason
from agent_rl.rollout import Rate, summarise
from agent_rl.rollout.evaluation import rate_interval
from tests.doubles import example_episode


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_rate_interval_matches_the_literature(successes, n, low, high):
    assert Rate(successes, n).interval == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_rate_interval_contains_the_rate(counts):
    rate = Rate(*counts)
    low, high = rate.interval
    assert 0 <= low <= rate.value <= high <= 1
    mirrored = Rate(rate.n - rate.successes, rate.n).interval
    assert mirrored == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("successes", "sizes"), [([4], [8]), ([2, 4], [4, 8])])
def test_rate_interval_of_equal_tasks_has_a_width(successes, sizes):
    low, high = rate_interval(successes, sizes)
    assert (low + high) / 2 == pytest.approx(0.5) and high - low > 0.7  # of one task and of two, whatever its samples


def test_rate_of_nothing_is_nan():
    assert math.isnan(Rate(0, 0).value)
    assert Rate(0, 0).interval == (0.0, 1.0)


def test_rate_prints_value_and_interval():
    assert str(Rate(3, 4)) == " 75.0% [30.1%, 95.4%] of 4"


def episode(correct: float | None, **changes):
    return example_episode(rewards=(Reward("correct", correct), Reward("clean", 1.0, 0.1)), **changes)


def test_summarise_counts_failures_apart():
    lost = episode(None, outcome=Outcome.FAILED, stop_reason=StopReason.ERROR)
    result = summarise([episode(1.0), episode(0.0), episode(0.5), lost])
    assert result.success == Rate(1, 3)
    assert result.reward == pytest.approx((1.1 + 0.1 + 0.6) / 3)
    assert result.failed == 1


def test_summarise_leaves_unscored_episodes_out():
    result = summarise([episode(1.0), episode(None)])
    assert result.success == Rate(1, 1)
    assert result.reward == pytest.approx(1.1)
    assert result.failed == 0


def test_summarise_averages_per_episode():
    result = summarise([episode(1.0), episode(1.0, messages=(), steps=())])
    assert (result.turns, result.tool_calls, result.tool_errors) == (1.0, 0.5, 0.5)


def test_summarise_of_nothing_is_nan():
    result = summarise([])
    assert result.success == Rate(0, 0)
    assert math.isnan(result.reward)
    assert math.isnan(result.turns)


def test_summary_row_names_split_and_sampling():
    row = summarise([episode(1.0), episode(0.0)]).row("eval", "greedy")
    assert (row["split"], row["sampling"], row["successes"], row["n"], row["success"]) == ("eval", "greedy", 1, 2, 0.5)
    assert row["reward"] == pytest.approx(0.6)
