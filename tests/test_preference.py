"""DPO, log-probabilities of sequences, and pairs: by hand, in their gradients, and at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms.objectives.pairwise import dpo_loss, preference_pairs, sequence_logprob
from agent_rl.errors import ConfigError

F64 = torch.float64
NAN, INF = float("nan"), float("inf")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# --- dpo ---


def test_dpo_by_hand() -> None:
    # (-10 + 12) - (-9 + 8) = 3, beta 0.1: m = 0.3, -log(1 / (1 + exp(-0.3))) = 0.55435524
    loss, margin = dpo_loss(tensor(-10), tensor(-9), tensor(-12), tensor(-8))
    assert (margin.item(), loss.item()) == pytest.approx((0.3, 0.55435524))
    # beta 0.5: m = 1.5, log(1 + exp(-1.5)) = 0.20141328
    loss, margin = dpo_loss(tensor(-10), tensor(-9), tensor(-12), tensor(-8), beta=0.5)
    assert (margin.item(), loss.item()) == pytest.approx((1.5, 0.20141328))
    # smoothed by a quarter: 0.75 * 0.20141328 + 0.25 * log(1 + exp(1.5)) = 0.15105996 + 0.25 * 1.70141328
    loss, margin = dpo_loss(tensor(-10), tensor(-9), tensor(-12), tensor(-8), beta=0.5, label_smoothing=0.25)
    assert (margin.item(), loss.item()) == pytest.approx((1.5, 0.57641328))


def test_dpo_at_the_reference_is_log_2() -> None:
    loss, margin = dpo_loss(tensor(-5, -7), tensor(-6, -1), tensor(-5, -7), tensor(-6, -1))
    assert margin.tolist() == [0, 0]
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)


floats = st.floats(-30, 30)


@given(floats, floats, floats, floats, st.floats(0.01, 1), st.floats(0, 0.49))
@settings(deadline=None, max_examples=30)
def test_dpo_gradient_by_hand(c: float, r: float, c_ref: float, r_ref: float, beta: float, smoothing: float) -> None:
    """With m's slope in the loss, `smoothing - sigmoid(-m)` (Rafailov et al. 2023, under eq. 7, for no smoothing)."""
    chosen, rejected = tensor(c).requires_grad_(), tensor(r).requires_grad_()
    loss, margin = dpo_loss(chosen, rejected, tensor(c_ref), tensor(r_ref), beta=beta, label_smoothing=smoothing)
    up, down = torch.autograd.grad(loss.sum(), [chosen, rejected])
    m = beta * ((c - c_ref) - (r - r_ref))
    slope = beta * (smoothing - 1 / (1 + math.exp(m)))
    assert margin.item() == pytest.approx(m)
    assert (up.item(), down.item()) == pytest.approx((slope, -slope), abs=1e-12)
    assert not margin.requires_grad


def test_dpo_gradient_matches_finite_differences() -> None:
    chosen, rejected = tensor(-3, 1, 8).requires_grad_(), tensor(-2, 4, -1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c, r: dpo_loss(c, r, tensor(0, 1, 2), tensor(2, 1, 0), label_smoothing=0.1)[0], [chosen, rejected]
    )


def test_dpo_stays_finite() -> None:
    chosen, rejected = tensor(1e4, -1e4).requires_grad_(), tensor(-1e4, 1e4)
    loss, margin = dpo_loss(chosen, rejected, tensor(0, 0), tensor(0, 0))
    assert margin.tolist() == [2000, -2000]
    assert loss.tolist() == [0, 2000]
    assert torch.autograd.grad(loss.sum(), chosen)[0].tolist() == pytest.approx([0, -0.1])


@pytest.mark.parametrize("smoothing", [-0.1, 0.5, 1.0, NAN])
def test_dpo_refuses_impossible_label_smoothing(smoothing: float) -> None:
    with pytest.raises(ConfigError, match=f"label_smoothing is {smoothing}"):
        dpo_loss(tensor(0), tensor(0), tensor(0), tensor(0), label_smoothing=smoothing)


# --- log-probabilities of sequences ---


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 5.0])
def test_sequence_logprob_counts_sampled_tokens_only(garbage: float) -> None:
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    logprobs = torch.where(mask, torch.tensor([-0.5, -1.0, -0.25, -2.0]), garbage).requires_grad_()
    found = sequence_logprob(logprobs, mask)
    assert found.dtype == F64
    assert found.tolist() == [-0.75, 0, -3.75]  # -0.5 - 0.25; none; -0.5 - 1 - 0.25 - 2
    assert torch.equal(torch.autograd.grad(found.sum(), logprobs)[0], mask.float())


def test_sequence_logprob_sums_long_rows_in_double() -> None:
    """20,000 tokens at -1.5 are -30,000, where float32 has steps of 0.00195: 0.0007 is lost, 0.0015 becomes a step.

    Halves add up exactly in any order, so only the last token is rounded. The margin is 0.0007 for each of chosen,
    chosen_reference (of the other sign) and rejected_reference, less 0.0015 for rejected: 0.0006. In float32 it is
    0 - 0 - (0.00195 - 0).
    """
    rows = torch.full((4, 20_000), -1.5)
    rows[:, -1] += torch.tensor([0.0007, 0.0015, -0.0007, 0.0007])
    short = rows.sum(-1)
    assert ((short[0] - short[2]) - (short[1] - short[3])).item() == pytest.approx(-(2**-9))
    chosen, rejected, chosen_reference, rejected_reference = sequence_logprob(rows, torch.ones_like(rows) > 0)
    margin = dpo_loss(chosen, rejected, chosen_reference, rejected_reference, beta=1.0)[1]
    assert margin.item() == pytest.approx(0.0006, abs=1e-6)


def test_dpo_subtracts_in_float64() -> None:
    # (-30,000 - 0.0007) - (-30,000 - 0) = -0.0007, where float32 has 0
    loss, margin = dpo_loss(*(torch.tensor([x]) for x in (-3e4, -3e4, 7e-4, 0.0)), beta=1.0)
    assert (loss.dtype, margin.dtype) == (F64, F64)
    assert margin.item() == pytest.approx(-7e-4)


# --- pairs ---


def pairs(scores: list[float], groups: list[int], margin: float = 0.0) -> list[list[int]]:
    found = preference_pairs(torch.tensor(scores, dtype=F64), torch.tensor(groups, dtype=torch.int64), margin=margin)
    assert found.dtype == torch.int64
    assert found.shape == (len(found), 2)
    return found.tolist()


def test_pairs_take_the_best_and_worst() -> None:
    # group 2 is episodes 1, 3 (0.5, 0.9); group 7 is 0, 2, 4, 5 (0.2, 1.0, -1.0, 0.3)
    assert pairs([0.2, 0.5, 1.0, 0.9, -1.0, 0.3], [7, 2, 7, 2, 7, 7]) == [[3, 1], [2, 4]]


def test_pairs_take_the_first_of_equals() -> None:
    assert pairs([0, 1, 0, 1], [5, 5, 5, 5]) == [[1, 0]]
    assert pairs([1, 0, 1, 0], [5, 5, 5, 5]) == [[0, 1]]


@pytest.mark.parametrize(
    ("scores", "groups"),
    [
        ([], []),
        ([0.5], [3]),
        ([0.5, 0.9], [3, 4]),
        ([0.3, 0.3, 0.3], [0, 0, 0]),
        ([0.3, 0.1 + 0.2], [0, 0]),  # float noise
        ([NAN, NAN], [0, 0]),
        ([NAN, 1.0], [0, 0]),
    ],
)
def test_pairs_skip_groups_without_a_pair(scores: list[float], groups: list[int]) -> None:
    assert pairs(scores, groups) == []


def test_pairs_skip_unscored_episodes() -> None:
    assert pairs([NAN, 0.1, NAN, 0.8, NAN], [1, 1, 1, 1, 9]) == [[3, 1]]


def test_pairs_require_more_than_the_margin() -> None:
    scores, groups = [0.0, 0.5, 0.3, 0.8, 0.0, 0.6], [0, 0, 1, 1, 2, 2]
    assert pairs(scores, groups, 0.4) == [[1, 0], [3, 2], [5, 4]]
    assert pairs(scores, groups, 0.5) == [[5, 4]]  # equal to the margin, and 0.8 - 0.3 to float noise: a tie
    assert pairs(scores, groups, 0.6) == []


@pytest.mark.parametrize("margin", [-0.1, NAN])
def test_pairs_refuse_a_negative_margin(margin: float) -> None:
    with pytest.raises(ConfigError, match=f"margin is {margin}"):
        pairs([1.0], [0], margin)


episodes = st.lists(
    st.tuples(st.one_of(st.just(NAN), st.integers(-2, 2).map(float)), st.integers(-3, 3)), min_size=1, max_size=20
)


@given(episodes, st.sampled_from([0.0, 1.0, 2.5]))
@settings(deadline=None, max_examples=30)
def test_pairs_match_a_loop_over_groups(rows: list[tuple[float, int]], margin: float) -> None:
    expected = []
    for group in sorted({g for _, g in rows}):
        members = [i for i, (score, g) in enumerate(rows) if g == group and not math.isnan(score)]
        if members:
            best, worst = max(members, key=lambda i: rows[i][0]), min(members, key=lambda i: rows[i][0])
            if rows[best][0] - rows[worst][0] > margin:
                expected.append([best, worst])
    assert pairs([s for s, _ in rows], [g for _, g in rows], margin) == expected
