"""KL penalties: values by hand, and their gradients in expectation over every token of a small vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms.objectives.kl import kl_estimate, kl_in_reward, unbiased_kl
from agent_rl.errors import ConfigError

KINDS = ["k1", "k2", "k3", "k1+", "k3+"]
F64 = torch.float64
NAN, INF = float("nan"), float("inf")


def logits(bound: float):
    return st.lists(st.floats(-bound, bound), min_size=5, max_size=5).map(lambda x: torch.tensor(x, dtype=F64))


def kl(theta: Tensor, reference: Tensor) -> Tensor:
    return (theta.exp() * (theta - reference)).sum()


def gradient(of: Tensor, wrt: Tensor) -> Tensor:
    return torch.autograd.grad(of, wrt, retain_graph=True)[0]


def at(x: float, kind: str, dtype: torch.dtype = F64) -> tuple[float, float]:
    """The estimate and its gradient for one token whose log-ratio is x."""
    logprobs = torch.tensor([[x - 1]], dtype=dtype, requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([[-1.0]], dtype=dtype), kind=kind)
    assert estimate.dtype == dtype
    return estimate.item(), gradient(estimate.sum(), logprobs).item()


# x = 0.5: k1 0.5, k2 0.25 / 2, k3 exp(-0.5) - 1 + 0.5 = 0.10653066; d k3 / dx = 1 - exp(-0.5) = 0.39346934
# x = -0.7: k1 -0.7, k2 0.49 / 2, k3 exp(0.7) - 1 - 0.7 = 0.31375271; d k3 / dx = 1 - exp(0.7) = -1.01375271
@pytest.mark.parametrize(
    ("kind", "x", "value", "slope"),
    [
        ("k1", 0.5, 0.5, 1),
        ("k2", 0.5, 0.125, 0.5),
        ("k3", 0.5, 0.10653066, 0.39346934),
        ("k1+", 0.5, 0.5, 0.5),
        ("k3+", 0.5, 0.10653066, 0.5),
        ("k1", -0.7, -0.7, 1),
        ("k2", -0.7, 0.245, -0.7),
        ("k3", -0.7, 0.31375271, -1.01375271),
        ("k1+", -0.7, -0.7, -0.7),
        ("k3+", -0.7, 0.31375271, -0.7),
        ("abs", 0.5, 0.5, 1),
        ("abs", -0.7, 0.7, -1),
    ],
)
def test_kl_estimate_values_and_slopes_by_hand(kind: str, x: float, value: float, slope: float) -> None:
    assert at(x, kind) == pytest.approx((value, slope), abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimate_is_zero_at_the_reference(kind: str) -> None:
    assert at(0.0, kind) == (0, 1 if kind == "k1" else 0)


# --- in expectation, on policy: |x| stays below 2.4, so k3's bound plays no part ---


@given(logits(0.6), logits(0.6))
@settings(deadline=None, max_examples=30)
def test_kl_estimate_expected_values_on_policy(theta: Tensor, reference: Tensor) -> None:
    theta, reference = theta.log_softmax(-1), reference.log_softmax(-1)
    for kind in KINDS:
        if kind != "k2":
            torch.testing.assert_close(
                (theta.exp() * kl_estimate(theta, reference, kind=kind)).sum(), kl(theta, reference)
            )


@given(logits(0.6), logits(0.6))
@settings(deadline=None, max_examples=30)
def test_kl_estimate_expected_gradients_on_policy(start: Tensor, other: Tensor) -> None:
    start.requires_grad_()
    theta, reference = start.log_softmax(-1), other.log_softmax(-1)
    # sampling is not differentiated: the weights are constants
    found = {k: gradient((theta.exp().detach() * kl_estimate(theta, reference, kind=k)).sum(), start) for k in KINDS}
    reverse, forward = gradient(kl(theta, reference), start), gradient(kl(reference, theta), start)
    for kind, expected in {
        "k1": torch.zeros(5, dtype=F64),
        "k2": reverse,
        "k1+": reverse,
        "k3+": reverse,
        "k3": forward,
    }.items():
        torch.testing.assert_close(found[kind], expected, msg=kind)


@given(logits(0.6), logits(0.6))
@settings(deadline=None, max_examples=30)
def test_abs_kl_has_the_gradient_of_the_total_variation(start: Tensor, other: Tensor) -> None:
    start.requires_grad_()
    theta, reference = start.log_softmax(-1), other.log_softmax(-1)
    found = gradient((theta.exp().detach() * kl_estimate(theta, reference, kind="abs")).sum(), start)
    torch.testing.assert_close(found, gradient((theta.exp() - reference.exp()).abs().sum(), start))


def test_k2_value_and_k3_gradient_are_biased() -> None:
    start = torch.tensor([0.5, -0.5, 0.0], dtype=F64, requires_grad=True)
    theta, reference = start.log_softmax(-1), torch.tensor([-0.5, 0.2, 0.3], dtype=F64).log_softmax(-1)
    k2 = (theta.exp() * kl_estimate(theta, reference, kind="k2")).sum()
    k3 = gradient((theta.exp().detach() * kl_estimate(theta, reference, kind="k3")).sum(), start)
    assert abs(k2 - kl(theta, reference)).item() > 0.01
    assert (k3 - gradient(kl(theta, reference), start)).abs().max().item() > 0.01


# --- in expectation, off policy ---


@given(logits(3), logits(3), logits(3))
@settings(deadline=None, max_examples=30)
def test_unbiased_kl_matches_the_kl_off_policy(start: Tensor, other: Tensor, sampler: Tensor) -> None:
    start.requires_grad_()
    theta, reference, behavior = start.log_softmax(-1), other.log_softmax(-1), sampler.log_softmax(-1)
    expected = (behavior.exp() * unbiased_kl(theta, behavior, reference)).sum()
    torch.testing.assert_close(expected, kl(theta, reference))
    torch.testing.assert_close(gradient(expected, start), gradient(kl(theta, reference), start))


@given(logits(3), logits(3), logits(3))
@settings(deadline=None, max_examples=30)
def test_unbiased_kl_differentiates_ratio_and_k3(a: Tensor, b: Tensor, c: Tensor) -> None:
    logprobs = a.requires_grad_()
    plain = (logprobs - b).exp() * ((c - logprobs).exp() - 1 - (c - logprobs))
    torch.testing.assert_close(unbiased_kl(logprobs, b, c), plain)
    torch.testing.assert_close(gradient(unbiased_kl(logprobs, b, c).sum(), logprobs), gradient(plain.sum(), logprobs))


def test_unbiased_kl_by_hand() -> None:
    # r = exp(-1 + 1.2) = 1.22140276, x = -1 + 1.5 = 0.5, k3 = 0.10653066 as above: r k3 = 0.13011685, r x = 0.61070138
    logprobs = torch.tensor([[-1.0]], dtype=F64, requires_grad=True)
    found = unbiased_kl(logprobs, torch.tensor([[-1.2]], dtype=F64), torch.tensor([[-1.5]], dtype=F64))
    assert found.item() == pytest.approx(0.13011685, abs=1e-8)
    assert gradient(found.sum(), logprobs).item() == pytest.approx(0.61070138, abs=1e-8)


def test_kl_estimate_gradient_is_biased_off_policy() -> None:
    start = torch.tensor([0.5, -0.5, 0.0], dtype=F64, requires_grad=True)
    theta, reference = start.log_softmax(-1), torch.tensor([-0.5, 0.2, 0.3], dtype=F64).log_softmax(-1)
    behavior = torch.tensor([1.0, 0.0, -1.0], dtype=F64).softmax(-1)
    true = gradient(kl(theta, reference), start)
    for kind in KINDS:
        found = gradient((behavior * kl_estimate(theta, reference, kind=kind)).sum(), start)
        assert (found - true).abs().max().item() > 0.01, kind


# --- numerics ---


def test_k3_bound_stops_its_gradient() -> None:
    # exp(2.7) - 1 - 2.7 = 11.2 > 10; exp(-12) - 1 + 12 = 11.0 > 10; exp(2.5) - 1 - 2.5 = 8.68249396
    for x in (-2.7, 12.0):
        assert at(x, "k3") == (10, 0)
        assert at(x, "k3+") == pytest.approx((10, x))
    assert at(-2.5, "k3") == pytest.approx((8.68249396, 1 - math.exp(2.5)))


def test_unbiased_kl_has_no_gradient_bound() -> None:
    # r = 1: k3 = exp(5) - 1 - 5 = 142.4131591, and the gradient points towards the reference
    logprobs = torch.tensor([[-6.0]], dtype=F64, requires_grad=True)
    found = unbiased_kl(logprobs, logprobs.detach(), torch.tensor([[-1.0]], dtype=F64))
    assert found.item() == pytest.approx(142.4131591)
    assert gradient(found.sum(), logprobs).item() == pytest.approx(-5)


@pytest.mark.parametrize("x", [1e4, -1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimate_stays_finite_at_absurd_log_ratios(kind: str, x: float) -> None:
    # k1 has slope 1; k3 is cut off; k2's slope is x
    value = {"k1": x, "k2": x * x / 2, "k3": 10}[kind.removesuffix("+")]
    slope = {"k1": 1, "k3": 0}.get(kind, x)
    assert at(x, kind, torch.float32) == pytest.approx((value, slope), rel=1e-3)


@pytest.mark.parametrize("behind", [1e4, -1e4])
@pytest.mark.parametrize("x", [1e4, -1e4])
def test_unbiased_kl_pulls_towards_the_reference(x: float, behind: float) -> None:
    logprobs = torch.zeros(1, 1, requires_grad=True)
    found = unbiased_kl(logprobs, torch.tensor([[-behind]]), torch.tensor([[-x]]))
    slope = gradient(found.sum(), logprobs).item()
    assert math.isfinite(found.item())
    # r is exp(20) or exp(-20); r k3's own derivative, clamped, would be positive whatever the sign of x
    assert slope == pytest.approx(math.exp(math.copysign(20, behind)) * x, rel=1e-5)


@given(st.floats(-1e-2, 1e-2))
@settings(deadline=None, max_examples=30)
def test_k3_keeps_small_log_ratios_in_float32(x: float) -> None:
    logprobs = torch.tensor([[x]], dtype=torch.float32)
    exact = math.expm1(-logprobs.double().item()) + logprobs.double().item()
    found = kl_estimate(logprobs, torch.zeros(1, 1), kind="k3").item()
    assert found >= 0
    assert found == pytest.approx(exact, abs=2e-7 * abs(x))  # exp(-x) - 1 + x is off by 6e-8 whatever x


def test_kl_keeps_dtype_of_the_log_probabilities() -> None:
    logprobs, double = torch.full((1, 2), -1.0), torch.full((1, 2), -1.5, dtype=F64)
    assert kl_estimate(logprobs, double, kind="k3").dtype == torch.float32
    assert unbiased_kl(logprobs, double, double).dtype == torch.float32


@pytest.mark.parametrize("kind", ["low_var_kl", "k2+", "k", ""])
def test_kl_estimate_refuses_unknown_kinds(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind!r}; there are k1, k2, k3".replace("+", r"\+")):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), kind=kind)  # type: ignore[arg-type]


# --- in the reward ---


def in_reward(kind: str, garbage: float = 0.0) -> Tensor:
    """Policy, env, policy, env: the terminal reward is on an env token; then a row that sampled nothing."""
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    old = torch.tensor([[-1.0, garbage, -2.0, garbage], [garbage] * 4])
    reference = torch.tensor([[-1.5, garbage, -1.3, -garbage], [-garbage] * 4])
    rewards = torch.tensor([[0.0, 0.0, 0.25, 1.0], [0.0, 0.5, 0.0, 0.0]])
    return kl_in_reward(rewards, old, reference, mask, coefficient=0.1, kind=kind)


# x is 0.5 at the first token and -0.7 at the third: -0.1 * k1 = -0.05 and 0.25 + 0.07; -0.1 * k2 = -0.0125 and
# 0.25 - 0.0245; -0.1 * k3 = -0.010653066 and 0.25 - 0.031375271
@pytest.mark.parametrize(
    ("kind", "first", "third"),
    [
        ("k1", -0.05, 0.32),
        ("k1+", -0.05, 0.32),
        ("k2", -0.0125, 0.2255),
        ("k3", -0.010653066, 0.218624729),
        ("k3+", -0.010653066, 0.218624729),
    ],
)
def test_kl_in_reward_by_hand(kind: str, first: float, third: float) -> None:
    expected = torch.tensor([[first, 0, third, 1], [0, 0.5, 0, 0]], dtype=F64)
    torch.testing.assert_close(in_reward(kind), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("garbage", [NAN, INF, 7.0])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_in_reward_spares_environment_tokens(kind: str, garbage: float) -> None:
    assert torch.equal(in_reward(kind, garbage), in_reward(kind))


def test_kl_in_reward_is_a_constant() -> None:
    old = torch.full((1, 2), -1.0, requires_grad=True)
    found = kl_in_reward(old * 2, old, old - 1, torch.ones(1, 2, dtype=torch.bool), coefficient=1, kind="k1")
    assert not found.requires_grad
    assert found.tolist() == [[-3, -3]]


@given(logits(3), logits(3))
@settings(deadline=None, max_examples=30)
def test_k1_in_reward_has_the_kl_gradient(start: Tensor, other: Tensor) -> None:
    """The policy gradient with no other reward, E[A grad log theta], descends the KL, by the coefficient."""
    start.requires_grad_()
    theta, reference = start.log_softmax(-1), other.log_softmax(-1)
    reward = kl_in_reward(torch.zeros(5), theta, reference, torch.ones(5) > 0, coefficient=0.3, kind="k1")
    ascent = gradient((theta.exp().detach() * reward * theta).sum(), start)
    torch.testing.assert_close(ascent, -0.3 * gradient(kl(theta, reference), start))
