"""agent_rl.algorithms.dynamic_sampling: cases by hand, and termination."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms.dynamic_sampling import DynamicSampling
from agent_rl.errors import ConfigError


def test_dynamic_sampling_selects_in_order_of_sampling():
    state = DynamicSampling(target=3)
    assert state.groups_to_sample() == 3
    state = state.update([False, True, False])
    # 2 are missing, the rate is (1 + 1) / (3 + 1): 2 / (1/2) = 4
    assert state.groups_to_sample() == 4
    assert (state.selected, state.reason) == ((1,), None)
    state = state.update([True, False, True, True])
    assert state.selected == (1, 3, 5)
    assert (state.rounds, state.sampled, state.accepted) == (2, 7, 4)
    assert (state.groups_to_sample(), state.reason) == (0, "full")


def test_dynamic_sampling_update_keeps_the_earlier_state():
    state = DynamicSampling(target=2)
    state.update([True])
    assert state == DynamicSampling(target=2)


def test_groups_to_sample_is_bounded_by_oversampling():
    state = DynamicSampling(target=4, oversampling=2.5).update([False] * 4)
    assert state.groups_to_sample() == 10  # 4 / (1 / 5) = 20, bounded by 2.5 * 4
    assert DynamicSampling(target=4, oversampling=1).update([False] * 4).groups_to_sample() == 4


def test_dynamic_sampling_gives_up_with_a_reason():
    state = DynamicSampling(target=8, max_rounds=3)
    for kept in ([True, False], [], [False, True, False]):  # a round in which every group failed counts too
        assert state.reason is None
        state = state.update(kept)
    assert state.reason == "gave up after 3 rounds with 2 of 8 groups"
    assert (state.groups_to_sample(), state.selected) == (0, (0, 3))


def test_dynamic_sampling_counts_late_groups_without_selecting():
    full = DynamicSampling(target=1).update([True])
    late = full.update([True, False, True])
    assert (late.selected, late.accepted, late.rounds, late.reason) == ((0,), 3, 1, "full")
    given_up = DynamicSampling(target=2, max_rounds=1).update([True]).update([True])
    assert (given_up.selected, given_up.accepted) == ((0,), 2)
    assert given_up.reason == "gave up after 1 rounds with 1 of 2 groups"


def test_batch_filled_in_the_last_round_is_full():
    assert DynamicSampling(target=1, max_rounds=1).update([True]).reason == "full"


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 0},
        {"target": 1, "max_rounds": 0},
        {"target": 1, "oversampling": 0.5},
        {"target": 1, "oversampling": math.inf},
        {"target": 1, "oversampling": math.nan},
    ],
)
def test_dynamic_sampling_refuses_impossible_settings(wrong):
    name, value = list(wrong.items())[-1]
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        DynamicSampling(**wrong)


@given(
    target=st.integers(1, 20),
    max_rounds=st.integers(1, 8),
    oversampling=st.floats(1, 5),
    rate=st.floats(0, 1),
    lost=st.integers(0, 3),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_dynamic_sampling_ends_and_never_overfills(target, max_rounds, oversampling, rate, lost, random):
    state = DynamicSampling(target, max_rounds, oversampling)
    flags: list[bool] = []
    rounds = 0
    while n := state.groups_to_sample():
        assert target - len(state.selected) <= n <= oversampling * target
        kept = [random.random() < rate for _ in range(max(n - lost, 0))]  # groups may get lost on the way
        state, flags, rounds = state.update(kept), flags + kept, rounds + 1
    assert rounds == state.rounds <= max_rounds
    passed = [i for i, keep in enumerate(flags) if keep]
    assert list(state.selected) == passed[:target]
    assert state.accepted == len(passed)
    assert state.sampled == len(flags)
    assert (state.reason == "full") == (len(passed) >= target)
    assert state.reason is not None


@given(target=st.integers(1, 30), every=st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_dynamic_sampling_wastes_one_group_at_most(target, every):
    state = DynamicSampling(target, oversampling=4)
    while n := state.groups_to_sample():
        state = state.update([(state.sampled + i) % every == 0 for i in range(n)])
    assert state.reason == "full"
    assert len(state.selected) == target
    assert state.accepted <= target + 1
