"""agent_rl.algorithms.objectives.sequence: values and gradients of the objectives per sequence."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms.objectives.sequence import gmpo, gspo, gspo_token, luspo, off_policy_sequences
from tests.tensors import token_loss

OBJECTIVES = {"gspo": gspo, "gspo-token": gspo_token, "luspo": luspo, "gmpo": gmpo}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
quick = settings(deadline=None, max_examples=30)
F64 = torch.float64
# a row with gaps and one that is shorter
MASK = torch.tensor([[False, True, True, False, True], [False, True, False, False, False]])


def seq_mean_token_mean(loss, mask):
    means = torch.where(mask, loss, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    return means.sum() / len(mask)


def seq_mean_token_sum(loss, mask):
    return torch.where(mask, loss, 0.0).sum() / len(mask)


def token_sum(loss, mask):
    return loss[mask].sum()


def run(objective, gaps, advantages, mask=None, total=seq_mean_token_mean):
    """Token losses of rows with these log-ratios, and the gradient of their aggregate."""
    gaps = torch.tensor(gaps, dtype=F64)
    mask = torch.ones_like(gaps, dtype=torch.bool) if mask is None else mask
    advantages = torch.tensor(advantages, dtype=F64).expand(gaps.shape)
    old = torch.linspace(-3, -1, gaps.numel(), dtype=F64).view(gaps.shape)
    logprobs = (old + gaps).requires_grad_()
    token = token_loss(objective, logprobs, old, torch.full_like(old, math.nan), advantages, mask)
    (slope,) = torch.autograd.grad(total(token.loss, mask), logprobs)
    assert not token.ratio.requires_grad
    assert token.clipped.dtype == torch.bool
    return token, slope


def close(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=F64))


# All of them


@pytest.mark.parametrize(("objective", "total"), [(o, seq_mean_token_mean) for o in (gspo, gspo_token, gmpo)])
@quick
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=2))
def test_sequence_objective_on_policy_is_reinforce(objective, total, advantages):
    token, slope = run(objective, [[0.0] * 5] * 2, [[a] for a in advantages], MASK, total)
    a, b = (-x / 2 for x in advantages)  # two sequences, of three tokens and of one
    close(slope, [[0, a / 3, a / 3, 0, a / 3], [0, b, 0, 0, 0]])
    close(token.loss[MASK], [-advantages[0]] * 3 + [-advantages[1]])
    close(token.ratio[MASK], [1.0] * 4)
    assert not token.clipped.any()


@every_objective
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4])
def test_sequence_objective_ignores_unmasked_tokens(objective, garbage):
    mask = torch.cat([MASK, torch.zeros(1, 5, dtype=torch.bool)])  # the last row has nothing sampled
    generator = torch.Generator().manual_seed(0)
    clean = [-torch.rand(3, 5, generator=generator, dtype=F64) for _ in range(3)]
    clean.append(torch.randn(3, 5, generator=generator, dtype=F64))
    got = []
    for tensors in (clean, [torch.where(mask, x, garbage) for x in clean]):
        logprobs = tensors[0].clone().requires_grad_()
        token = token_loss(objective, logprobs, *tensors[1:], mask)
        (slope,) = torch.autograd.grad(seq_mean_token_mean(token.loss, mask), logprobs)
        assert (slope[~mask] == 0).all()
        assert not token.clipped[~mask].any()
        assert torch.isfinite(token.loss).all()
        got.append([slope] + [x[mask] for x in (token.loss, token.ratio, token.clipped)])
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)


@every_objective
@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_sequence_objective_stays_finite_at_absurd_ratios(objective, gap, advantage):
    old = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    logprobs = (old + torch.tensor([[gap, gap], [0.0, 0.0]])).requires_grad_()
    mask = torch.ones(2, 2, dtype=torch.bool)
    token = token_loss(objective, logprobs, old, old, torch.full((2, 2), advantage), mask)
    (slope,) = torch.autograd.grad(token_sum(token.loss, mask), logprobs)
    assert torch.isfinite(token.loss).all()
    assert torch.isfinite(slope).all()
    scale = 2 if objective is luspo else 1
    torch.testing.assert_close(slope[1], torch.full((2,), -advantage * scale))  # the other row is as if alone


@every_objective
def test_sequence_objective_keeps_dtype_and_shape(objective):
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    others = torch.tensor([[-1.1, -2.2]], dtype=F64)
    token = token_loss(
        objective, logprobs, others, others, torch.ones(1, 2, dtype=F64), torch.ones(1, 2, dtype=torch.bool)
    )
    assert (token.loss.dtype, token.ratio.dtype, token.clipped.dtype) == (torch.float32, torch.float32, torch.bool)
    assert token.loss.shape == token.ratio.shape == token.clipped.shape == (1, 2)


# GSPO

# the first row's log-ratios .3, -.1 and .1 have the mean .1, the second row's only one is -.2
GAPS = [[9.0, 0.3, -0.1, 9.0, 0.1], [9.0, -0.2, 9.0, 9.0, 9.0]]
S = math.exp(0.1), math.exp(-0.2)


@pytest.mark.parametrize("objective", [gspo, gspo_token])
def test_gspo_by_hand(objective):
    wide = partial(objective, clip_low_eps=0.5, clip_high_eps=0.5)
    token, slope = run(wide, GAPS, [[2.0], [-3.0]], MASK)
    close(token.loss[MASK], [-2 * S[0]] * 3 + [3 * S[1]])
    close(token.ratio[MASK], [S[0]] * 3 + [S[1]])
    # the mean over two sequences of -A s, and ds / dlog theta_t = s / 3 or s
    a, b = -2 * S[0] / 3 / 2, 3 * S[1] / 2
    close(slope, [[0, a, a, 0, a], [0, b, 0, 0, 0]])
    assert not token.clipped.any()


@pytest.mark.parametrize("objective", [gspo, gspo_token])
def test_gspo_clips_whole_sequences(objective):
    narrow = partial(objective, clip_low_eps=0.15, clip_high_eps=0.05)
    # s = 1.105 > 1.05 with A > 0, s = .819 < .85 with A < 0: both clipped
    token, slope = run(narrow, GAPS, [[2.0], [-3.0]], MASK)
    close(token.loss[MASK], [-2 * 1.05] * 3 + [3 * 0.85])
    assert (slope == 0).all()
    assert torch.equal(token.clipped, MASK)
    # the other way round neither
    token, slope = run(narrow, GAPS, [[-2.0], [3.0]], MASK)
    close(token.loss[MASK], [2 * S[0]] * 3 + [-3 * S[1]])
    assert (slope[MASK] != 0).all()
    assert not token.clipped.any()


@pytest.mark.parametrize("objective", [gspo, gspo_token])
def test_gspo_clamps_no_single_token(objective):
    # the mean of 30, -29.7 and 0 is .1; clamped one by one to 20 they would have the mean 0
    wide = partial(objective, clip_low_eps=0.5, clip_high_eps=0.5)
    token, _ = run(wide, [[30.0, -29.7, 0.0]], [[1.0]])
    close(token.ratio, [[S[0]] * 3])


def test_gspo_defaults_match_the_paper():
    for objective in (gspo, gspo_token):
        assert run(objective, [[3.9e-4]] * 2, [[1.0]] * 2)[0].clipped.sum() == 0
        assert run(objective, [[4.1e-4]] * 2, [[1.0]] * 2)[0].clipped.sum() == 2
        assert run(objective, [[-2.9e-4]] * 2, [[-1.0]] * 2)[0].clipped.sum() == 0
        assert run(objective, [[-3.1e-4]] * 2, [[-1.0]] * 2)[0].clipped.sum() == 2


@quick
@given(
    st.lists(st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=5), min_size=2, max_size=2),
    st.lists(st.floats(-3, 3), min_size=2, max_size=2),
)
def test_gspo_token_with_equal_advantages_is_gspo(gaps, advantages):
    a, b = (
        run(partial(o, clip_low_eps=0.1, clip_high_eps=0.2), gaps, [[x] for x in advantages], MASK)
        for o in (gspo, gspo_token)
    )
    torch.testing.assert_close(a[0].loss[MASK], b[0].loss[MASK])
    torch.testing.assert_close(a[1], b[1])
    assert torch.equal(a[0].clipped & MASK, b[0].clipped & MASK)


def test_gspo_averages_advantages_within_a_row():
    advantages = [[1.0, -2.0, 4.0]]
    gaps = [[0.3, 0.0, 0.0]]  # s = exp(.1) = 1.105
    clip = {"clip_low_eps": 0.05, "clip_high_eps": 0.05}
    # GSPO has their mean, 1, which is clipped
    token, slope = run(partial(gspo, **clip), gaps, advantages)
    close(token.loss, [[-1.05] * 3])
    assert (slope == 0).all()
    # GSPO-token clips those above 0 only; the middle one's loss is 2 s, a third of which is the gradient
    token, slope = run(partial(gspo_token, **clip), gaps, advantages)
    close(token.loss, [[-1.05, 2 * S[0], -4.2]])
    close(slope, [[0, 2 * S[0] / 3, 0]])
    assert token.clipped.tolist() == [[True, False, True]]


def test_luspo_is_gspo_times_length():
    knobs = {"clip_low_eps": 0.5, "clip_high_eps": 0.5}
    plain, _ = run(partial(gspo, **knobs), GAPS, [[2.0], [-3.0]], MASK)
    token, slope = run(partial(luspo, **knobs), GAPS, [[2.0], [-3.0]], MASK)
    close(token.loss[MASK], [-6 * S[0]] * 3 + [3 * S[1]])
    torch.testing.assert_close(seq_mean_token_mean(token.loss, MASK), seq_mean_token_sum(plain.loss, MASK))
    a, b = -2 * S[0] / 2, 3 * S[1] / 2  # no token's gradient is divided by its sequence's length
    close(slope, [[0, a, a, 0, a], [0, b, 0, 0, 0]])
    torch.testing.assert_close(token.ratio, plain.ratio)
    assert run(luspo, [[2.4e-3]], [[1.0]])[0].clipped.sum() == 0
    assert run(luspo, [[2.6e-3]], [[1.0]])[0].clipped.sum() == 1
    assert run(luspo, [[-1.9e-3]], [[-1.0]])[0].clipped.sum() == 0
    assert run(luspo, [[-2.1e-3]], [[-1.0]])[0].clipped.sum() == 1


# GMPO


@pytest.mark.parametrize(
    ("advantage", "mean", "clipped"),
    [
        # above only: .4 - .5 + .1 = 0; below only: .6 - .3 + .1 = .4; neither: .6 - .5 + .1 = .2
        (2.0, 0.0, [True, False, False]),
        (-2.0, 0.4 / 3, [False, True, False]),
        (0.0, 0.2 / 3, [False, False, False]),
    ],
)
def test_gmpo_by_hand(advantage, mean, clipped):
    objective = partial(gmpo, clip_low_eps=0.3)
    token, slope = run(objective, [[0.6, -0.5, 0.1]], [[advantage]])
    g = math.exp(mean)
    close(token.loss, [[-advantage * g] * 3])
    close(token.ratio, [[g] * 3])
    close(slope, [[0.0 if c else -advantage * g / 3 for c in clipped]])
    assert token.clipped.tolist() == [clipped]


def test_gmpo_clips_the_logarithm():
    # exp(-.4) = .67 and exp(.4) = 1.49
    for ratio, advantage, clipped in ((0.68, -1, 0), (0.66, -1, 1), (1.48, 1, 0), (1.5, 1, 1), (0.1, 1, 0), (9, -1, 0)):
        assert run(gmpo, [[math.log(ratio)]], [[advantage]])[0].clipped.sum() == clipped


def test_gmpo_counts_sampled_tokens_only():
    token, slope = run(gmpo, GAPS, [[2.0], [-3.0]], MASK)
    close(token.ratio[MASK], [S[0]] * 3 + [S[1]])
    a, b = -2 * S[0] / 3 / 2, 3 * S[1] / 2
    close(slope, [[0, a, a, 0, a], [0, b, 0, 0, 0]])


# Off-policy sequences


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, 1e4])
def test_off_policy_sequences_by_hand(garbage):
    mask = torch.tensor([[True, True, False]] * 5 + [[False] * 3])
    mu = torch.full((6, 3), -1.0, dtype=F64)
    # the means of log(mu / theta) are .2, .2, .2, .05 and -.2
    drift = torch.tensor([[0.5, -0.1], [0.5, -0.1], [0.5, -0.1], [0.2, -0.1], [-0.5, 0.1], [3.0, 3.0]], dtype=F64)
    theta = mu - torch.cat([drift, torch.zeros(6, 1)], 1)
    advantages = torch.tensor([-1.0, 1.0, 0.0, -1.0, -1.0, -1.0], dtype=F64)[:, None].expand(6, 3)
    theta, mu, advantages = (torch.where(mask, x, garbage) for x in (theta, mu, advantages))
    got = off_policy_sequences(theta.requires_grad_(), mu, advantages, mask, delta=0.1)
    assert got.tolist() == [True, False, False, False, False, False]
    assert got.dtype == torch.bool
    assert (
        off_policy_sequences(theta, mu, advantages, mask, delta=0.04).tolist()
        == [True, False, False, True] + [False] * 2
    )
    assert not off_policy_sequences(theta, mu, advantages, mask, delta=0.21).any()


def test_off_policy_sequences_without_a_gap_is_empty():
    logprobs = -torch.rand(4, 7)
    mask = torch.ones(4, 7, dtype=torch.bool)
    assert not off_policy_sequences(logprobs, logprobs, -torch.ones(4, 7), mask, delta=0.0).any()
    # advantages that differ: their mean decides
    advantages = torch.tensor([[-3.0, 1.0], [3.0, -1.0]])
    gone = off_policy_sequences(torch.full((2, 2), -2.0), -torch.ones(2, 2), advantages, mask[:2, :2], delta=1e-4)
    assert gone.tolist() == [True, False]
