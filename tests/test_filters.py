"""Filters, each against hand-made cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms.filters import (
    on_policy,
    varied_groups,
)
from agent_rl.algorithms.group_stats import group_index, group_range
from agent_rl.errors import ConfigError

NAN = math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# --- by episode ---


def test_on_policy_bounds_the_version_lag():
    # staleness: 0, 1, 2, 3, newer than the one trained, nothing sampled
    versions = ids(7, 6, 5, 4, 8, -1)
    assert on_policy(versions, 7, max_staleness=2).tolist() == [True, True, True, False, True, False]
    assert on_policy(versions, 7, max_staleness=0).tolist() == [True, False, False, False, True, False]


def test_on_policy_drops_episodes_without_tokens():
    assert on_policy(ids(-1, 0), 0, max_staleness=5).tolist() == [False, True]


# --- by group ---


def test_varied_groups_keeps_unequal_scores():
    scores = f64(1, 0, 1, 1, 0, 0, 0.5, 1)
    groups = ids(9, 9, 4, 4, -3, -3, 9, 7)  # 9: 1, 0, .5; 4: all right; -3: all wrong; 7: alone
    assert varied_groups(scores, groups).tolist() == [True, True, False, False, False, False, True, False]


def test_varied_groups_takes_scores_outside_unit_range():
    # a filter on 0 < mean < 1 would drop both: their means are 2 and -1
    assert varied_groups(f64(1, 3, -3, 1), ids(0, 0, 1, 1)).all()


def test_varied_groups_ignores_rounding_noise():
    assert not varied_groups(f64(0.1 + 0.2, 0.3), ids(0, 0)).any()
    assert varied_groups(f64(0.0, 0.5), ids(0, 0), tolerance=0.49).all()
    assert not varied_groups(f64(0.0, 0.5), ids(0, 0), tolerance=0.5).any()


def test_varied_groups_drops_unscored_episodes():
    scores = f64(1, NAN, 1, 0, NAN, 1, NAN)
    groups = ids(0, 0, 0, 1, 1, 1, 2)
    assert varied_groups(scores, groups).tolist() == [False, False, False, True, False, True, False]


def test_filters_take_an_empty_batch():
    nothing = f64()
    assert varied_groups(nothing, ids()).shape == (0,)


def test_group_range_ignores_nan():
    values, groups = f64(2, NAN, -1, 5, NAN), ids(3, 3, 3, 8, 1)
    low, high = group_range(values, group_index(groups, values))
    assert low.tolist() == [-1, -1, -1, 5, math.inf]
    assert high.tolist() == [2, 2, 2, 5, -math.inf]
    with pytest.raises(ConfigError, match=r"\(3,\).*\(2,\)"):
        group_index(ids(0, 0), f64(1, 2, 3))


batches = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 0.1 + 0.2, 1.0, NAN]), st.integers(-2, 2)), min_size=1, max_size=12
)


@given(batches, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_varied_groups_matches_its_definition(pairs, random):
    def kept(rows):
        return varied_groups(f64(*(s for s, _ in rows)), ids(*(g for _, g in rows))).tolist()

    def expected(score, group):
        known = [s for s, g in pairs if g == group and not math.isnan(s)]
        return not math.isnan(score) and max(known) - min(known) > 1e-6

    assert kept(pairs) == [expected(*pair) for pair in pairs]
    shuffled = random.sample(pairs, len(pairs))
    assert kept(shuffled) == [expected(*pair) for pair in shuffled]
