"""agent_rl.algorithms.advantages.token: settled rewards, returns, GAE, whitening, the optimal token baseline."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.algorithms.advantages.token import (
    gae,
    optimal_baseline,
    path_variance,
    reinforce_pp,
    returns_to_go,
    settle,
    whiten,
)
from tests.drawn import factors, numbers, quick, rows
from tests.tensors import bits, same, t64

NAN = math.nan


def compact(mask, *grids):
    """The same rows without their gaps: what was sampled stands first, zeros and False follow."""
    order = (~mask).int().argsort(dim=-1, stable=True)
    moved = mask.gather(-1, order)
    return moved, *(torch.where(moved, g.gather(-1, order), 0.0) for g in grids)


def test_settle_moves_rewards_to_earlier_sampled_tokens():
    rewards = t64([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    mask = bits("001011", "100100", "000000")
    # row 0: 1 and 2 have none before, they go to token 2 with its own 3 and the 4 behind it
    same(settle(rewards, mask), t64([[0, 0, 10, 0, 5, 6], [6, 0, 0, 15, 0, 0], [0] * 6]))


@quick
@given(rows())
def test_settle_loses_nothing(batch):
    rewards, _, mask = batch
    got = settle(rewards, mask)
    same(got.sum(-1), torch.where(mask.any(-1), rewards.sum(-1), 0.0))
    assert not got[~mask].any()
    same(settle(got, mask), got)


def test_returns_by_hand():
    rewards, mask = t64([[0, 1, 0, 0, 2, 3]]), bits("010110")
    # settled: 1 at token 1, 0 at 3, 2 + 3 at 4; backwards: 5, 0 + .5 * 5, 1 + .5 * 2.5
    same(returns_to_go(rewards, mask, gamma=0.5), t64([[0, 2.25, 0, 2.5, 5, 0]]))
    same(returns_to_go(rewards, mask), t64([[0, 6, 0, 5, 5, 0]]))
    same(returns_to_go(rewards, mask, gamma=0.0), t64([[0, 1, 0, 0, 5, 0]]))


def test_gae_by_hand():
    # sampled: tokens 0, 2, 3 with values 1, 2, 3 and rewards 0, 1, 4 (token 1's goes to 0: .5; the last's to 3)
    rewards, values = t64([[0, 0.5, 1, 3, 1]]), t64([[1, NAN, 2, 3, NAN]])
    mask = bits("10110")
    # gamma .5, lam .5; deltas: 4 + 0 - 3 = 1; 1 + 1.5 - 2 = .5; .5 + 1 - 1 = .5
    # advantages: 1; .5 + .25 * 1 = .75; .5 + .25 * .75 = .6875
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    same(advantages, t64([[0.6875, 0, 0.75, 1, 0]]))
    same(returns, t64([[1.6875, 0, 2.75, 4, 0]]))


@quick
@given(rows(), factors, factors)
def test_gae_matches_the_plain_recursion(batch, gamma, lam):
    rewards, values, mask = batch
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    settled = settle(rewards, mask)
    for i, row in enumerate(mask):
        at = row.nonzero().flatten().tolist()
        running, after = 0.0, 0.0
        want = torch.zeros(len(row), dtype=torch.float64)
        for j in reversed(at):
            running = float(settled[i, j]) + gamma * after - float(values[i, j]) + gamma * lam * running
            want[j], after = running, float(values[i, j])
        same(advantages[i], want)
        same(returns[i], torch.where(row, want + values[i], 0.0))


@quick
@given(rows(), factors)
def test_gae_with_lambda_one_is_returns_minus_values(batch, gamma):
    rewards, values, mask = batch
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    want = returns_to_go(rewards, mask, gamma=gamma)
    same(advantages, torch.where(mask, want - values, 0.0))
    same(returns, want)


@quick
@given(rows(), factors)
def test_token_advantages_ignore_gaps(batch, gamma):
    rewards, values, mask = batch
    groups = torch.zeros(len(mask), dtype=torch.int64)

    def everything(rewards, values, mask):
        returns = returns_to_go(rewards, mask, gamma=gamma)
        weights = path_variance(torch.sigmoid(values).log(), torch.full_like(values, 0.5), mask)
        baselined = optimal_baseline(returns, weights, mask, groups)
        return (
            returns,
            *gae(rewards, values, mask, gamma=gamma),
            whiten(returns_to_go(rewards, mask), mask),
            weights,
            baselined,
        )

    rewards = settle(rewards, mask)
    dense, r, v = compact(mask, rewards, values)
    for sparse, packed in zip(everything(rewards, values, mask), everything(r, v, dense), strict=True):
        assert not sparse[~mask].any()
        same(sparse[mask], packed[dense], 1e-9)


@quick
@given(rows())
def test_token_advantages_ignore_unmasked_values(batch):
    _, x, mask = batch
    zeros, groups = torch.zeros_like(x), torch.zeros(len(x), dtype=torch.int64)
    for garbage in (NAN, math.inf, -math.inf):
        dirty = torch.where(mask, x, garbage)
        for f in (
            lambda y: gae(zeros, y, mask)[0],
            lambda y: gae(zeros, y, mask)[1],
            lambda y: whiten(y, mask),
            lambda y: path_variance(y, zeros, mask),
            lambda y: path_variance(zeros, y, mask),
            lambda y: optimal_baseline(y, zeros + 1, mask, groups),
            lambda y: optimal_baseline(zeros + 1, y, mask, groups),
        ):
            assert torch.equal(f(dirty), f(torch.where(mask, x, 0.0)))


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_token_advantages_settle_trailing_rewards(gamma):
    mask, values = bits("0110110000"), torch.linspace(-1, 1, 10)[None]
    late, early = torch.zeros(1, 10), torch.zeros(1, 10)
    late[0, 8] = early[0, 5] = 3.0
    assert torch.equal(returns_to_go(late, mask, gamma=gamma), returns_to_go(early, mask, gamma=gamma))
    assert torch.equal(gae(late, values, mask, gamma=gamma)[0], gae(early, values, mask, gamma=gamma)[0])
    assert float(returns_to_go(late, mask, gamma=gamma)[0, 1]) == pytest.approx(3 * gamma**3)


def test_returns_keep_precision_over_long_rows():
    t = 4097  # not a power of two
    got = returns_to_go(torch.ones(1, t), torch.ones(1, t, dtype=torch.bool), gamma=0.99)
    # sum of .99^k, k < n, is (1 - .99^n) / .01
    left = torch.arange(t, 0, -1, dtype=torch.float64)
    same(got[0], (1 - 0.99**left) / 0.01, 1e-9)


def test_whiten_by_hand():
    x, mask = t64([[1, NAN, 3], [8, 0, 0]]), bits("101", "100")
    # 1, 3, 8: mean 4, variance (9 + 1 + 16) / 2 = 13
    scale = 1 / math.sqrt(13 + 1e-8)
    same(whiten(x, mask), t64([[-3 * scale, 0, -scale], [4 * scale, 0, 0]]))


def test_whiten_without_comparison_is_zero():
    assert not whiten(t64([[5, 6], [7, 8]]), bits("00", "00")).any()
    assert not whiten(t64([[5, 6]]), bits("01")).any()
    for value in (0.1, 85.66477024459854, -1e4):
        assert not whiten(t64([[value] * 7]), bits("1111111")).any()  # exactly, or 1e-8 would blow it up
    same(whiten(t64([[1e4, -1e4]]), bits("11")), t64([[1, -1]]) / math.sqrt(2))  # variance 2e8
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)


def test_reinforce_pp_by_hand():
    # returns with gamma .5: row 0 has 1, 2; row 1 has 0; mean 1, variance (0 + 1 + 1) / 2 = 1
    mask = bits("101", "010")
    got = whiten(reinforce_pp(t64([[0, 0, 2], [0, 0, 0]]), mask, gamma=0.5), mask)
    same(got, t64([[0, 0, 1], [0, -1, 0]]), 1e-7)


def test_token_advantages_keep_unscored_rows_nan():
    rewards, mask = t64([[1, 0, 2], [0, 3, NAN], [4, 0, 1]]), bits("111", "110", "011")
    assert returns_to_go(rewards, mask)[1].isnan().tolist() == [True, True, False]

    def everything(rewards, mask):
        returns, ones = returns_to_go(rewards, mask), torch.ones(mask.shape)
        baselined = optimal_baseline(returns, ones, mask, torch.full((len(mask),), 7))
        return returns, gae(rewards, ones, mask)[0], whiten(returns_to_go(rewards, mask), mask), baselined

    keep = torch.tensor([0, 2])
    for whole, part in zip(everything(rewards, mask), everything(rewards[keep], mask[keep]), strict=True):
        same(whole[keep], part)
        assert whole[1, :2].isnan().all()
        assert whole[1, 2] == 0


def test_path_variance_by_hand():
    logprobs = t64([[NAN, math.log(0.5), 5.0, 0.0, math.log(0.25), -1e4]])
    squares = t64([[NAN, 0.5, 5.0, 1.0, 0.375, 0.5]])
    # 1 - 1 + .5 = .5; 1 - 2 + 1 = 0; 1 - .5 + .375 = .875; 1 - 0 + .5
    same(path_variance(logprobs, squares, bits("010111")), t64([[0, 0.5, 0, 0.5, 1.375, 2.875]]))
    # rounding below 0, as of float32 probabilities near 1
    same(path_variance(t64([[0.0, 0.0]]), t64([[1 - 1e-7, 1.0]]), bits("11")), t64([[0, 0]]))


@quick
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.data())
def test_path_variance_matches_the_squared_gradient(logits, data):
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    token = data.draw(st.integers(0, len(logits) - 1))
    logprob = logits.log_softmax(0)[token]
    (gradient,) = torch.autograd.grad(logprob, logits, retain_graph=True)
    squares = logits.softmax(0).square().sum()
    got = path_variance(logprob.reshape(1, 1), squares.reshape(1, 1), bits("1"))
    same(got, gradient.square().sum().reshape(1, 1), 1e-10)


def test_optimal_baseline_by_hand():
    returns = t64([[0, 4, 4, 6], [1, 0, 2, 0], [0, 9, 9, 0], [3, 0, 0, 0]])
    weights = t64([[NAN, 1, 2, 4], [3, 0, 2, 0], [NAN, 1, 2, 0], [5, 0, 0, 0]])
    mask, groups = bits("0111", "1010", "0110", "1000"), torch.tensor([5, 5, -2, 9])
    # group 5: first step (4 * 1 + 1 * 3) / 4 = 1.75, second (4 * 2 + 2 * 2) / 4 = 3, third only row 0
    # groups -2 and 9 have one row each
    alone = [[0, 0, 0, 0], [0, 0, 0, 0]]
    got = optimal_baseline(returns, weights, mask, groups)
    same(got, t64([[0, 2.25, 1, 6], [-0.75, 0, -1, 0], *alone]))
    got = optimal_baseline(returns, weights, mask, groups, zero_tail=False)
    same(got, t64([[0, 2.25, 1, 0], [-0.75, 0, -1, 0], *alone]))


def test_optimal_baseline_without_comparison_is_zero():
    ones, pair = bits("11", "11"), torch.tensor([0, 0])
    # no weight at all: the plain mean
    same(optimal_baseline(t64([[1, 2], [3, 6]]), torch.zeros(2, 2), ones, pair), t64([[-1, -2], [1, 2]]))
    # a row without sampled tokens is no company
    assert not optimal_baseline(t64([[1, 2], [3, 6]]), torch.ones(2, 2), bits("11", "00"), pair).any()
    none = torch.zeros(0, 2)
    assert optimal_baseline(none, none, none.bool(), pair[:0]).shape == (0, 2)


@quick
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=20), st.sampled_from([0.1, 0.7, 85.66477024459854, -1e4]))
def test_optimal_baseline_of_equal_returns_is_zero(weights, value):
    weights = t64(weights)[:, None]
    mask, groups = torch.ones_like(weights, dtype=torch.bool), torch.zeros(len(weights), dtype=torch.int64)
    assert not optimal_baseline(torch.full_like(weights, value), weights, mask, groups).any()  # exactly


@quick
@given(rows(), numbers)
def test_optimal_baseline_minimises_the_weighted_square(batch, shift):
    returns, values, _ = batch
    mask = torch.ones_like(returns, dtype=torch.bool)
    weights, groups = values.abs() + 0.5, torch.zeros(len(mask), dtype=torch.int64)
    got = optimal_baseline(returns, weights, mask, groups)
    best = (weights * got.square()).sum(0)
    assert (best <= (weights * (got + shift).square()).sum(0) + 1e-9).all()
    same(optimal_baseline(returns + 100, weights, mask, groups), got, 1e-9)  # all as long: no tail


def test_token_advantages_are_float64_without_gradient():
    x = torch.rand(2, 3, dtype=torch.float32, requires_grad=True)
    mask, groups = bits("110", "011"), torch.tensor([0, 0])
    for got in (
        settle(x, mask),
        returns_to_go(x, mask),
        *gae(x, x, mask),
        whiten(x, mask),
        whiten(returns_to_go(x, mask), mask),
        path_variance(x, x, mask),
        optimal_baseline(x, x, mask, groups),
    ):
        assert got.dtype == torch.float64
        assert not got.requires_grad
        assert got.isfinite().all()
    # a float32 discount would show: .9 in float32 is off by 2e-8
    same(returns_to_go(torch.tensor([[0.0, 1.0]]), bits("11"), gamma=0.9), t64([[0.9, 1]]), 1e-15)
    got, _ = gae(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), bits("11"), gamma=1.0, lam=0.9)
    same(got, t64([[0.9, 1]]), 1e-15)
