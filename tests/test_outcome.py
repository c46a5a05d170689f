"""agent_rl.algorithms.advantages.episode: advantages of whole episodes."""

import math
from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms.advantages import episode
from agent_rl.algorithms.advantages.episode import (
    best_of_group,
    group_relative,
    leave_one_out,
    length_weighted,
    max_likelihood,
    over_greedy,
    pass_at_k,
)
from agent_rl.errors import ConfigError

nan = math.nan
few = settings(deadline=None, max_examples=30)


def by_position(scores, groups):
    return length_weighted(scores, groups, torch.arange(1, len(scores) + 1))


def decoupled(components, weights, groups, *, batch_norm=True, **options):
    return episode.decoupled(components, weights, groups, whiten="episodes" if batch_norm else "no", **options)


def single(scores, groups, **options):
    return decoupled(scores[:, None], torch.ones(1), groups, batch_norm=False, **options)


unnormalised, std_best = partial(group_relative, std=False), partial(best_of_group, std=True)
EVERY = {
    "group_relative": group_relative,
    "unnormalised": unnormalised,
    "leave_one_out": leave_one_out,
    "length_weighted": lambda s, g: length_weighted(s, g, s.abs() + 1),  # lengths that move with the episodes
    "best_of_group": best_of_group,
    "std_best": std_best,
    "max_likelihood": max_likelihood,
    "decoupled, not whitened": single,
    "decoupled": lambda s, g: decoupled(torch.stack([s, s**2], -1), torch.tensor([1.0, 0.5]), g),
}
every = pytest.mark.parametrize("advantage", EVERY.values(), ids=EVERY)


def call(advantage, scores, groups, **options):
    """The advantage of lists, as a list; group ids are letters."""
    ids = torch.tensor([ord(g) for g in groups], dtype=torch.int64)
    got = advantage(torch.tensor(scores, dtype=torch.float64), ids, **options)
    assert got.dtype == torch.float64 and got.shape == (len(scores),)
    return got.tolist()


def close(*values, within=1e-12):
    return pytest.approx(list(values), rel=within, abs=within, nan_ok=True)


# By hand. Group a: 1, 0, 0, 1, mean .5, variance 4 * .25 / 3; group b: 3, 1, mean 2, variance 2


def test_group_relative_by_hand():
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    assert call(group_relative, [1.0, 3, 0, 0, 1, 1], "abaaab") == close(a, b, -a, -a, a, -b)
    assert call(unnormalised, [1.0, 3, 0, 0, 1, 1], "abaaab") == [0.5, 1, -0.5, -0.5, 0.5, -1]
    assert call(group_relative, [3.0, 1], "bb", eps=1.0) == close(1 / (math.sqrt(2) + 1), -1 / (math.sqrt(2) + 1))
    assert call(group_relative, [0.7, 0.7, 1, 3], "aabb", eps=0.0) == close(0, 0, -math.sqrt(0.5), math.sqrt(0.5))


def test_leave_one_out_by_hand():
    # the others' means: of 1 in group a (0 + 0 + 1) / 3, of 0 (1 + 0 + 1) / 3; in group b the other score
    assert call(leave_one_out, [1.0, 3, 0, 0, 1, 1], "abaaab") == close(2 / 3, 2, -2 / 3, -2 / 3, 2 / 3, -2)


def test_length_weighted_by_hand():
    # group a: (10 * 1 + 30 * 0) / 40 = .25; group b: (1 * 4 + 1 * 0 + 2 * 1) / 4 = 1.5
    lengths = torch.tensor([10, 1, 30, 1, 2])
    assert call(length_weighted, [1.0, 4, 0, 0, 1], "ababb", lengths=lengths) == [0.75, 2.5, -0.25, -1.5, -0.5]
    # group a: nothing scored was sampled, the plain mean 2; group b: the first was not, the second is the baseline
    lengths = torch.tensor([0, 0, 9, 0, 7])
    assert call(length_weighted, [1.0, 3, nan, 5, 6], "aaabb", lengths=lengths) == close(-1, 1, nan, -1, 0)
    for unscored in (5.0, nan, math.inf):
        got = call(length_weighted, [1.0, 0, nan], "aaa", lengths=torch.tensor([1, 3, unscored]))
        assert got == close(0.75, -0.25, nan)


def test_over_greedy_by_hand():
    got = over_greedy(torch.tensor([1, 0, nan, 1]), torch.tensor([0.25, 1, 0, nan]))
    assert got.dtype == torch.float64 and got.tolist() == close(0.75, -1, nan, nan)


def test_best_of_group_by_hand():
    # group a: 5 leads 3 by 2; group b: -1 leads -4 by 3; group c: two share the best score, none leads
    scores, groups = [5.0, 3, 1, -4, -1, 2, 2, 0], "aaabbccc"
    assert call(best_of_group, scores, groups) == [2, 0, 0, 0, 3, 0, 0, 0]
    # standard deviations: a sqrt((4 + 0 + 4) / 2) = 2, b sqrt(4.5)
    a, b = 2 / (2 + 1e-6), 3 / (math.sqrt(4.5) + 1e-6)
    assert call(std_best, scores, groups) == close(a, 0, 0, 0, b, 0, 0, 0)


def test_max_likelihood_by_hand():
    low, b = -0.25 / (0.25 + 1e-6), 1 / (2 + 1e-6)  # group a: mean 1/4; group b: mean 2
    assert call(max_likelihood, [1.0, 0, 3, 0, 0, 1], "aabaab") == close(-3 * low, low, b, low, low, -b)
    assert call(max_likelihood, [1.0, 0, 0, 0], "aaaa", eps=0.0) == [3, -1, -1, -1]
    for equal in (0.0, -2.0, 1.0):
        assert call(max_likelihood, [equal] * 3, "aaa") == [0, 0, 0]
    for failure in (-1.0, -5.0):  # below 0 what fails is the zero; a group without such a score keeps its own
        scores = [1.0, failure, failure, failure, 3, 1]
        assert call(max_likelihood, scores, "aaaabb", eps=0.0) == [3, -1, -1, -1, 0.5, -0.5]


def test_decoupled_by_hand():
    # one group; deviations: of (1, 0, 0, 1) sqrt(1/3), of (0, 0, 0, 2) with mean .5 sqrt((3 * .25 + 2.25) / 3) = 1
    components = torch.tensor([[1.0, 0], [0, 0], [0, 0], [1, 2]])
    weights, groups = torch.tensor([2.0, 3]), torch.tensor([6, 6, 6, 6])
    a, b = 2 * 0.5 / (math.sqrt(1 / 3) + 1e-6), 3 / (1 + 1e-6)
    total = [a - 0.5 * b, -a - 0.5 * b, -a - 0.5 * b, a + 1.5 * b]
    assert decoupled(components, weights, groups, batch_norm=False).tolist() == close(*total)
    std = math.sqrt(sum(t**2 for t in total) / 3)
    assert decoupled(components, weights, groups).tolist() == close(*[t / (std + 1e-6) for t in total])


def test_decoupled_whitens_over_all_groups():
    # by themselves both groups have ±1/sqrt 2; the batch's deviation is sqrt(4 * .5 / 3)
    components = torch.tensor([[1.0], [0], [500], [100]])
    one, got = math.sqrt(3 / 4), decoupled(components, torch.ones(1), torch.tensor([4, 4, -9, -9]), eps=0.0)
    assert got.tolist() == close(one, -one, one, -one)
    for weight, on in ((1.0, True), (0.0, True), (0.0, False)):
        got = decoupled(components[:1], torch.tensor([weight]), torch.tensor([5]), batch_norm=on)
        assert got.tolist() == [0] and got.dtype == torch.float64


@pytest.mark.parametrize("batch_norm", [True, False])
def test_decoupled_drops_episodes_with_unscored_components(batch_norm):
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    components = torch.tensor([[1.0, 5, 0], [0, nan, 9], [2, 6, nan], [4, 1, 9], [1, 0, 0], [0, 3, 0]])
    weights, kept = torch.tensor([1.0, 2, 0]), [0, 2, 3, 4, 5]  # the NaN of weight 0 does not matter
    got = decoupled(components, weights, groups, batch_norm=batch_norm)
    want = decoupled(components[kept, :2], weights[:2], groups[kept], batch_norm=batch_norm)
    assert got[1].isnan() and got[kept].tolist() == close(*want.tolist())


@few
@given(st.lists(st.floats(0, 1), min_size=3, max_size=9))
def test_decoupled_leaves_equal_groups_at_zero(others):
    # the mean of a batch is 0 but for rounding: subtracting it would move the first group
    scores, groups = torch.tensor([[0.1], [0.1], *[[s] for s in others]]), torch.tensor([0, 0] + [1] * len(others))
    assert decoupled(scores, torch.ones(1), groups)[:2].tolist() == [0, 0]


# Pass@k


def brute_force(scores, k):
    """The definition: mean and standard deviation over all sets, and the mean over those with each episode."""
    sets = [(s, float(max(scores[i] for i in s))) for s in combinations(range(len(scores)), k)]
    mean = sum(r for _, r in sets) / len(sets)
    sigma = math.sqrt(sum((r - mean) ** 2 for _, r in sets) / len(sets))
    if sigma == 0:
        return [0.0] * len(scores)
    mine = [[r for s, r in sets if i in s] for i in range(len(scores))]
    return [(sum(rs) / len(rs) - mean) / sigma for rs in mine]


@pytest.mark.parametrize("k", range(1, 8))
def test_pass_at_k_matches_enumeration(k):
    scores, groups, want = [], "", []
    for successes in range(8):  # groups of 7 with any number of successes
        group = [float(i < successes) for i in range(7)]
        scores, groups, want = scores + group, groups + "abcdefgh"[successes] * 7, want + brute_force(group, k)
    assert call(pass_at_k, scores, groups, k=k) == close(*want)


def test_pass_at_k_takes_sums_of_weighted_rewards():
    one = 0.7 + 0.2 + 0.1
    assert one != 1 and call(pass_at_k, [one, 0, 0], "aaa", k=2) == call(pass_at_k, [1, 0, 0], "aaa", k=2)


def test_pass_at_k_stays_exact_for_large_groups():
    # C(32, 32) / C(64, 32) is 5e-19: 1 - rho would be 0
    got = call(pass_at_k, [1] * 32 + [0] * 32, "a" * 64, k=32)
    one = 1 / math.sqrt(math.comb(64, 32) - 1)
    assert got == pytest.approx([one] * 32 + [-one] * 32, rel=1e-12, abs=0)


def test_pass_at_k_counts_scored_episodes():
    a, b = math.sqrt(0.5), -math.sqrt(0.125)  # rho = 2/3, sigma = sqrt(2)/3, of the sets with a failure half succeed
    assert call(pass_at_k, [1, nan, 0, nan, 0], "aaaaa", k=2) == close(a, nan, b, nan, b)
    assert call(pass_at_k, [1, nan, nan, 0], "aaaa", k=3) == close(0, nan, nan, 0)  # no set of 3 was scored
    assert call(pass_at_k, [nan, nan], "aa", k=2) == close(nan, nan)


def test_pass_at_k_refuses_impossible_settings():
    with pytest.raises(ConfigError, match=r"0 and 1, not 0\.5"):
        call(pass_at_k, [1, nan, 0.5], "aaa", k=2)
    with pytest.raises(ConfigError, match=rf"k=3 .* group {ord('b')} has 2"):
        call(pass_at_k, [1, 0, 1, 0, 0], "ababa", k=3)
    with pytest.raises(ConfigError, match="k=0"):
        call(pass_at_k, [1, 0], "aa", k=0)


# All of them

SAME = [[0.7], [0.1 + 0.2] * 3, [85.66477024459854] * 3, [0.7, nan], [0.0] * 4, [-1e4, -1e4], [nan, nan], []]


@every
@pytest.mark.parametrize("scores", SAME)
def test_advantage_without_comparison_is_zero(advantage, scores):
    got = call(advantage, scores, "g" * len(scores))
    assert [math.isnan(a) for a in got] == [math.isnan(s) for s in scores]
    assert {a for a in got if not math.isnan(a)} <= {0.0}


@every
def test_epsilon_keeps_rounding_noise_small(advantage):
    assert call(advantage, [0.3, 0.1 + 0.2, 0.3], "ggg") == close(0, 0, 0, within=1e-4)


@every
def test_advantage_is_computed_in_float64(advantage):
    scores, groups = torch.tensor([3, 0, 1, 1]), torch.tensor([7, 7, 2, 7])
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        got = advantage(scores.to(dtype), groups)
        assert got.dtype == torch.float64 and got.equal(advantage(scores.double(), groups))


@every
@pytest.mark.parametrize("groups", [[0], [0, 0, 0], [[0, 0]]])
def test_advantage_refuses_mismatched_groups(advantage, groups):
    with pytest.raises(ConfigError, match="one of each per episode"):
        advantage(torch.zeros(2), torch.tensor(groups))


def test_advantage_refuses_mismatched_inputs():
    zeros = torch.tensor([0, 0])
    with pytest.raises(ConfigError, match=r"lengths of shape \(1,\)"):
        length_weighted(torch.zeros(2), zeros, torch.ones(1))
    with pytest.raises(ConfigError, match=r"baselines of shape \(1,\)"):
        over_greedy(torch.zeros(2), torch.ones(1))


def test_decoupled_scores_no_episode_without_components():
    assert decoupled(torch.zeros(2, 0), torch.ones(0), torch.tensor([0, 0])).isnan().all()


episodes = st.lists(
    st.tuples(st.one_of(st.integers(0, 8), st.just(nan)), st.sampled_from([-5, 3, 2**40])), min_size=1, max_size=12
)


def tensors(pairs):
    return torch.tensor([float(s) for s, _ in pairs], dtype=torch.float64), torch.tensor([g for _, g in pairs])


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9, equal_nan=True)


@few
@given(episodes, st.randoms(use_true_random=False))
def test_advantage_does_not_depend_on_order(pairs, random):
    scores, groups = tensors(pairs)
    order = list(range(len(pairs)))
    random.shuffle(order)
    for advantage in EVERY.values():
        assert_same(advantage(scores[order], groups[order]), advantage(scores, groups)[order])


@few
@given(episodes)
def test_advantage_ignores_unscored_episodes(pairs):
    scores, groups = tensors(pairs)
    kept = ~scores.isnan()
    for advantage in EVERY.values():
        got = advantage(scores, groups)
        assert got.isnan().equal(~kept)
        assert_same(got[kept], advantage(scores[kept], groups[kept]))


@few
@given(episodes, st.integers(-1000, 1000))
def test_baseline_advantage_ignores_group_shifts(pairs, shift):
    scores, groups = tensors(pairs)
    shifted = scores + shift * (groups == 3)
    for advantage in (group_relative, unnormalised, leave_one_out, by_position, best_of_group, std_best, single):
        assert_same(advantage(shifted, groups), advantage(scores, groups))


@few
@given(episodes, st.floats(0.01, 100))
def test_advantage_scales_or_normalises(pairs, scale):
    scores, groups = tensors(pairs)
    for advantage in (unnormalised, leave_one_out, by_position, best_of_group):
        assert_same(advantage(scores * scale, groups), advantage(scores, groups) * scale)
    for advantage in (group_relative, std_best, max_likelihood, single):
        assert_same(advantage(scores * scale, groups, eps=0.0), advantage(scores, groups, eps=0.0))


@few
@given(episodes)
def test_group_advantages_sum_to_zero(pairs):
    scores, groups = tensors(pairs)
    for advantage in (group_relative, leave_one_out, max_likelihood, single, EVERY["decoupled"]):
        for group in groups.unique():
            assert advantage(scores, groups)[groups == group].nansum().item() == pytest.approx(0, abs=1e-9)
