"""agent_rl.algorithms.objectives.token: values and gradients of the objectives per token."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms.objectives.token import cispo, dppo_kl, dppo_tv, m2po, minirl, ppo_clip, reinforce, sapo
from agent_rl.errors import ConfigError
from tests.tensors import token_loss

OBJECTIVES = {
    "reinforce": reinforce,
    "ppo": ppo_clip,
    "ppo-dual": partial(ppo_clip, clip_high_eps=0.28, dual_clip=3.0),
    "cispo-eps": partial(cispo, clip_low_eps=0.2, clip_high_eps=0.28),
    "cispo-cap": partial(cispo, clip_high_cap=5.0),
    "sapo": sapo,
    "dppo-tv": dppo_tv,
    "dppo-kl": dppo_kl,
    "minirl": minirl,
    "m2po": m2po,
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
quick = settings(deadline=None, max_examples=30)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def one(objective, *, theta, old=None, mu=None, advantage=1.0):
    """The loss of one token from its probabilities, and its gradient by theta's log-probability."""
    old = theta if old is None else old
    logprobs = row(math.log(theta)).requires_grad_()
    others = row(math.log(old)), row(math.log(old if mu is None else mu))
    token = token_loss(objective, logprobs, *others, row(advantage), torch.ones(1, 1, dtype=torch.bool))
    (slope,) = torch.autograd.grad(token.loss.sum(), logprobs)
    assert not token.ratio.requires_grad
    assert token.clipped.dtype == torch.bool
    return token.loss.item(), slope.item(), token.clipped.item(), token.ratio.item()


# All of them


@every_objective
@quick
@given(st.lists(st.tuples(st.floats(-12, -1e-3), st.floats(-3, 3)), min_size=1, max_size=6))
def test_objective_gradient_on_policy_is_reinforce(objective, tokens):
    logprobs, advantages = row(*(p for p, _ in tokens)).requires_grad_(), row(*(a for _, a in tokens))
    same = logprobs.detach()
    token = token_loss(objective, logprobs, same, same, advantages, torch.ones_like(same, dtype=torch.bool))
    (slope,) = torch.autograd.grad(token.loss.sum(), logprobs)
    torch.testing.assert_close(slope, -advantages)
    torch.testing.assert_close(token.ratio, torch.ones_like(same))
    assert not token.clipped.any()


@pytest.mark.parametrize(
    ("name", "loss"),
    # theta = .5 and A = 3. A surrogate's value is -A, SAPO's -2 A / tau, a weighted policy gradient's -A log .5
    [("ppo", -3.0), ("m2po", -3.0), ("sapo", -6.0)]
    + [(name, -3 * math.log(0.5)) for name in ("reinforce", "cispo-eps", "dppo-tv", "dppo-kl", "minirl")],
)
def test_objective_value_on_policy(name, loss):
    assert one(OBJECTIVES[name], theta=0.5, advantage=3.0)[0] == pytest.approx(loss)


@every_objective
@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_objective_stays_finite_at_absurd_ratios(objective, gap, advantage):
    for theta, other in ((-1.0 + min(gap, 0), -1.0 - max(gap, 0)), (-2e4 + gap, -2e4)):
        logprobs = torch.tensor([[theta, -1.0]], requires_grad=True)
        others = torch.tensor([[other, -1.0]])
        token = token_loss(
            objective, logprobs, others, others, torch.full((1, 2), advantage), torch.ones(1, 2, dtype=torch.bool)
        )
        (slope,) = torch.autograd.grad(token.loss.sum(), logprobs)
        assert torch.isfinite(token.loss).all()
        assert torch.isfinite(token.ratio).all()
        assert torch.isfinite(slope).all()
        assert slope[0, 1] == pytest.approx(-advantage)


@every_objective
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4])
def test_objective_ignores_unmasked_tokens(objective, garbage):
    mask = torch.tensor([[False, True, False, True, True], [False] * 5])
    generator = torch.Generator().manual_seed(0)
    clean = [-torch.rand(2, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    clean.append(torch.randn(2, 5, generator=generator, dtype=torch.float64))
    got = []
    for tensors in (clean, [torch.where(mask, x, garbage) for x in clean]):
        logprobs = tensors[0].clone().requires_grad_()
        token = token_loss(objective, logprobs, *tensors[1:], mask)
        (slope,) = torch.autograd.grad(token.loss[mask].sum(), logprobs)
        got.append([x[mask] for x in (token.loss, slope, token.ratio, token.clipped)])
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)


@every_objective
def test_objective_keeps_dtype_and_shape(objective):
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    others = torch.tensor([[-1.1, -2.2]], dtype=torch.float64)
    token = token_loss(objective, logprobs, others, others, row(1.0, -1.0), torch.ones(1, 2, dtype=torch.bool))
    assert (token.loss.dtype, token.ratio.dtype, token.clipped.dtype) == (torch.float32, torch.float32, torch.bool)
    assert token.loss.shape == token.ratio.shape == token.clipped.shape == (1, 2)
    empty = torch.zeros(0, 2)
    assert token_loss(objective, empty, empty, empty, empty, empty.bool()).loss.shape == (0, 2)


# Each by hand


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope", "clipped"),
    [
        (1, 1.27, -1.27, -1.27, False),
        (1, 1.29, -1.28, 0.0, True),
        (1, 0.5, -0.5, -0.5, False),  # worse than before: never clipped
        (-1, 0.81, 0.81, 0.81, False),
        (-1, 0.79, 0.8, 0.0, True),
        (-2, 2.9, 5.8, 5.8, False),
        (-2, 3.1, 6.0, 0.0, True),  # dual clip: at most 2 * 3
        (1, 3.1, -1.28, 0.0, True),
        (0, 3.1, 0.0, 0.0, False),
    ],
)
def test_ppo_clip_by_hand(advantage, ratio, loss, slope, clipped):
    got = one(OBJECTIVES["ppo-dual"], theta=0.25 * ratio, old=0.25, mu=0.9, advantage=advantage)
    assert got == (pytest.approx(loss), pytest.approx(slope), clipped, pytest.approx(ratio))


def test_ppo_without_dual_clip_has_no_bound():
    assert one(ppo_clip, theta=0.8, old=0.1, advantage=-2.0)[:3] == (pytest.approx(16), pytest.approx(16), False)


def test_reinforce_reports_the_unused_ratio():
    got = one(reinforce, theta=0.5, old=0.1, mu=0.9, advantage=-2.0)
    assert got == (pytest.approx(2 * math.log(0.5)), pytest.approx(2.0), False, pytest.approx(5.0))


@pytest.mark.parametrize(
    ("knobs", "ratio", "weight"),
    [
        ({"clip_high_eps": 0.28}, 2.0, 1.28),
        ({"clip_high_eps": 0.28}, 1.2, 1.2),
        ({"clip_high_eps": 4.0}, 8.0, 5.0),
        ({"clip_high_cap": 5.0}, 8.0, 5.0),  # the same bound, TRL's spelling
        ({"clip_high_cap": 5.0}, 4.9, 4.9),
        ({"clip_high_cap": 5.0}, 0.01, 0.01),  # MiniMax has no lower bound
        ({"clip_high_cap": 5.0, "clip_low_eps": 0.2}, 0.01, 0.8),
        ({"clip_high_cap": 5.0, "clip_low_eps": 10.0}, 0.01, 0.01),  # verl's spelling of "none"
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -3.0])
def test_cispo_by_hand(knobs, ratio, weight, advantage):
    loss, slope, clipped, reported = one(partial(cispo, **knobs), theta=0.1 * ratio, old=0.1, advantage=advantage)
    assert loss == pytest.approx(-weight * advantage * math.log(0.1 * ratio))
    assert slope == pytest.approx(-weight * advantage)  # also where it is clipped
    assert clipped is (ratio != weight)
    assert reported == pytest.approx(ratio)


@pytest.mark.parametrize("knobs", [{}, {"clip_high_eps": 0.28, "clip_high_cap": 5.0}])
def test_cispo_requires_one_upper_bound(knobs):
    with pytest.raises(ConfigError, match=r"clip_high_eps=.* clip_high_cap="):
        one(partial(cispo, **knobs), theta=0.5)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05), (-2.0, 3.0)])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 2.0])
def test_sapo_by_hand(advantage, tau, ratio):
    objective = partial(sapo, tau_negative=tau) if advantage < 0 else sapo
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    # the derivative of 4 / tau sigmoid(tau (r - 1)) by log theta is 4 sigmoid (1 - sigmoid) r
    want = -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio
    got = one(objective, theta=0.3 * ratio, old=0.3, advantage=advantage)
    assert got == (pytest.approx(want[0]), pytest.approx(want[1]), False, pytest.approx(ratio))


def test_sapo_gradient_matches_finite_differences():
    old, advantages = row(-1.0, -2.0, -0.5), row(1.0, -2.0, 0.5)
    logprobs = row(-0.8, -2.3, -1.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sapo(x, old, advantages).loss, logprobs)


@pytest.mark.parametrize(
    ("theta", "mu", "advantage", "weight", "clipped"),
    [
        (0.65, 0.5, 1.0, 1.3, False),
        (0.75, 0.5, 1.0, 0.0, True),  # .25 up, more than .2
        (0.75, 0.5, -1.0, 1.5, False),  # about to come back
        (0.45, 0.5, -1.0, 0.9, False),
        (0.35, 0.5, -1.0, 0.0, True),  # .15 down, more than .1
        (0.35, 0.5, 1.0, 0.7, False),
        (0.01, 0.001, 1.0, 10.0, False),  # rare: PPO would clip it
        (0.1, 0.001, 1.0, 20.0, True),  # kept, with its weight of 100 capped
        (0.75, 0.5, 0.0, 0.0, False),
    ],
)
def test_dppo_tv_by_hand(theta, mu, advantage, weight, clipped):
    objective = partial(dppo_tv, delta_low=0.1, delta_high=0.2)
    got = one(objective, theta=theta, old=0.9, mu=mu, advantage=advantage)
    want = pytest.approx(-advantage * weight * math.log(theta)), pytest.approx(-advantage * weight)
    assert got == (*want, clipped, pytest.approx(theta / mu))


@pytest.mark.parametrize(
    ("theta", "advantage", "delta", "kept"),
    [
        # KL(.5 || .75) = .5 ln(.5 / .75) + .5 ln(.5 / .25) = .1438; the reverse KL would be .1308
        (0.75, 1.0, 0.14, False),
        (0.75, 1.0, 0.15, True),
        (0.75, -1.0, 0.0, True),
        (0.25, -1.0, 0.14, False),
        (0.25, -1.0, 0.15, True),
        (0.25, 1.0, 0.0, True),
    ],
)
def test_dppo_kl_by_hand(theta, advantage, delta, kept):
    # the other direction's delta must not matter
    deltas = {"delta_high": delta, "delta_low": 1 - delta} if advantage > 0 else {"delta_low": delta, "delta_high": 0.0}
    got = one(partial(dppo_kl, **deltas), theta=theta, old=0.9, mu=0.5, advantage=advantage)
    weight = theta / 0.5 if kept else 0.0
    want = pytest.approx(-advantage * weight * math.log(theta)), pytest.approx(-advantage * weight)
    assert got == (*want, not kept, pytest.approx(theta / 0.5))


def test_dppo_kl_between_certain_tokens_is_small():
    # KL(1 - 1e-6 || 1 - 1e-9) < 1e-5, though 1 - p is 0 in float32
    theta, mu = torch.tensor([[-1e-9, 0.0, 0.0, -1e-6]]), torch.tensor([[-1e-6, -1e-6, 0.0, 0.0]])
    for advantage in (1.0, -1.0):
        advantages = torch.full_like(theta, advantage)
        assert not dppo_kl(theta, mu, advantages, delta_low=1e-4, delta_high=1e-4).clipped.any()


@pytest.mark.parametrize(
    ("theta", "old", "mu", "advantage", "weight", "clipped"),
    [
        (0.25, 0.2, 0.1, 1.0, 2.5, False),  # theta / old = 1.25, theta / mu = 2.5
        (0.26, 0.2, 0.1, 1.0, 0.0, True),  # 1.3 > 1.27
        (0.26, 0.2, 0.1, -1.0, 2.6, False),
        (0.1, 0.12, 0.1, -1.0, 1.0, False),  # .83
        (0.1, 0.13, 0.1, -1.0, 0.0, True),  # .77 < .8
        (0.1, 0.13, 0.1, 1.0, 1.0, False),
        (0.1, 0.1, 0.01, 1.0, 5.0, True),  # theta / mu = 10, capped
        (0.1, 0.1, 0.9, 1.0, 1 / 9, False),  # no lower bound
    ],
)
def test_minirl_by_hand(theta, old, mu, advantage, weight, clipped):
    got = one(minirl, theta=theta, old=old, mu=mu, advantage=advantage)
    want = pytest.approx(-advantage * weight * math.log(theta)), pytest.approx(-advantage * weight)
    assert got == (*want, clipped, pytest.approx(theta / old))
