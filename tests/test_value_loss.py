"""The value loss: by hand, its clipping, and its mask; explained variance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms.objectives.value import explained_variance, value_loss

F64 = torch.float64
NAN, INF = float("nan"), float("inf")


def one(value: float, old: float, target: float, clip_eps: float | None = 0.2) -> tuple[float, float, bool]:
    """The loss of one token, its gradient, and whether it was clipped."""
    values = torch.tensor([[value]], dtype=F64, requires_grad=True)
    mask = torch.tensor([[True]])
    loss, clipped = value_loss(
        values, torch.tensor([[old]], dtype=F64), torch.tensor([[target]], dtype=F64), mask, clip_eps=clip_eps
    )
    loss.sum().backward()
    assert values.grad is not None
    return loss.item(), values.grad.item(), clipped.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.405, -0.9, False),  # within: (1.1 - 2)^2 / 2
        (1.5, 1.0, 2.0, 0.32, 0.0, True),  # moved up to the target: clip is 1.2, (1.2 - 2)^2 / 2
        (0.5, 1.0, 0.0, 0.32, 0.0, True),  # moved down to the target: clip is 0.8, 0.8^2 / 2
        (0.5, 1.0, 2.0, 1.125, -1.5, False),  # moved away from it: clip is 0.8, nearer; (0.5 - 2)^2 / 2
        (1.5, 1.0, 0.0, 1.125, 1.5, False),  # moved away from it: 1.5^2 / 2
        (3.0, 1.0, 2.0, 0.5, 1.0, False),  # past it, further than the clip: (3 - 2)^2 / 2 > (1.2 - 2)^2 / 2
        (2.5, 1.0, 2.0, 0.32, 0.0, True),  # past it, less far than the clip
        (2.0, 2.0, 2.0, 0.0, 0.0, False),
    ],
)
def test_value_loss_by_hand(value: float, old: float, target: float, loss: float, slope: float, clipped: bool) -> None:
    found = one(value, old, target)
    assert found[:2] == pytest.approx((loss, slope))
    assert found[2] is clipped


def test_value_loss_does_not_clip_a_draw() -> None:
    # clip is 1.5; V = 2.5 and 1.5 are as far from R = 2: 0.5^2 / 2, with all of V's gradient
    assert one(2.5, 1.0, 2.0, 0.5) == (0.125, 0.5, False)


def test_value_loss_without_clipping_by_hand() -> None:
    # (1.5 - 2)^2 / 2; clipped it would be 0.32
    assert one(1.5, 1.0, 2.0, None) == pytest.approx((0.125, -0.5, False))


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_value_loss_stays_finite_at_absurd_values(value: float) -> None:
    assert one(value, 0.0, 0.0) == pytest.approx((5e7, value, False))


floats = st.floats(-3, 3)


@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=6), st.floats(0.05, 1))
@settings(deadline=None, max_examples=30)
def test_value_loss_clipping_only_raises_the_loss(rows: list[tuple[float, float, float]], clip_eps: float) -> None:
    for row in rows:
        plain, clipped = one(*row, None), one(*row, clip_eps)
        assert clipped[0] >= plain[0]
        assert clipped[1] == (0 if clipped[2] else plain[1])
        assert clipped[2] is (clipped[0] > plain[0])
        assert not (clipped[2] and abs(row[0] - row[1]) < clip_eps)


def test_value_loss_gradient_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    values, old, target = (torch.randn(3, 7, dtype=F64, generator=generator) for _ in range(3))
    mask = torch.rand(3, 7, generator=generator) < 0.7
    values.requires_grad_()
    assert value_loss(values, old, target, mask)[1].any()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, target, mask)[0], [values])


@pytest.mark.parametrize("garbage", [NAN, INF, 1e4])
@pytest.mark.parametrize("clip_eps", [0.2, None])
def test_value_loss_ignores_unmasked_tokens(clip_eps: float | None, garbage: float) -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    values, old, target = (torch.where(mask, x, garbage) for x in (1.5, torch.tensor(1.0), torch.tensor(2.0)))
    values.requires_grad_()
    loss, clipped = value_loss(values, old, target, mask, clip_eps=clip_eps)
    loss.sum().backward()
    # 0.32 clipped, (1.5 - 2)^2 / 2 not
    expected = 0.125 if clip_eps is None else 0.32
    torch.testing.assert_close(loss.detach(), torch.tensor([[expected, 0, expected], [0, 0, 0]]))
    slope = -0.5 if clip_eps is None else 0.0
    torch.testing.assert_close(values.grad, torch.tensor([[slope, 0, slope], [0, 0, 0]]))
    assert torch.equal(clipped, mask if clip_eps is not None else torch.zeros_like(mask))


def test_value_loss_keeps_dtype_of_the_values() -> None:
    values = torch.zeros(1, 2, requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(1, 2), torch.ones(1, 2, dtype=F64), torch.ones(1, 2) > 0)
    assert (loss.dtype, clipped.dtype) == (torch.float32, torch.bool)
    assert not clipped.requires_grad


# --- explained variance ---


def explained(values: list[float], returns: list[float], mask: list[bool] | None = None) -> float:
    kept = torch.tensor([[True] * len(values) if mask is None else mask], dtype=torch.bool)
    predicted = torch.tensor([values], dtype=torch.float32, requires_grad=True)
    return explained_variance(predicted, torch.tensor([returns], dtype=F64), kept)


def test_explained_variance_by_hand() -> None:
    # R = 0, 1, 2: deviations -1, 0, 1. R - V = 0, 0.5, 1: deviations -0.5, 0, 0.5. 1 - 0.5 / 2
    assert explained([0, 0.5, 1], [0, 1, 2]) == pytest.approx(0.75)
    assert explained([5, 6, 7], [0, 1, 2]) == pytest.approx(1)  # an offset is not variance
    assert explained([3, 3, 3], [0, 1, 2]) == pytest.approx(0)
    assert explained([2, 1, 0], [0, 1, 2]) == pytest.approx(-3)  # R - V = -2, 0, 2: 1 - 8 / 2
    # in 1e-4: R - V = -1, 1, 2, its mean 2/3, its squares 25/9 + 1/9 + 16/9 = 14/3, over 2; verl would say 0.998
    assert explained([1e-4, 0, 0], [0, 1e-4, 2e-4]) == pytest.approx(1 - 7 / 3)


def test_explained_variance_counts_sampled_tokens_only() -> None:
    mask = [True, False, True, True, False]
    assert explained([0, NAN, 0.5, 1, INF], [0, INF, 1, 2, NAN], mask) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "returns",
    [[], [1.0], [0.0, 0.0, 0.0], [2.0, 2.0], [0.3, 0.1 + 0.2, 0.3], [1e4, 1e4 + 1e-3]],
)
def test_explained_variance_of_constant_returns_is_undefined(returns: list[float]) -> None:
    assert math.isnan(explained([0.5 * i for i in range(len(returns))], returns))


def test_explained_variance_of_nothing_sampled() -> None:
    nothing: Tensor = torch.zeros(2, 3, dtype=torch.bool)
    assert math.isnan(explained_variance(torch.zeros(2, 3), torch.ones(2, 3), nothing))
