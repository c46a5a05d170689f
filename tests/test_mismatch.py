"""agent_rl.algorithms.diagnostics: metrics of the gap between mu and old."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms.corrections import Weights, token_icepop
from agent_rl.algorithms.diagnostics import (
    correction_metrics,
    mismatch,
    policy_version_histogram,
)
from agent_rl.errors import ConfigError
from agent_rl.moe.agreement import route_agreement, token_agreement

NAN, INF = math.nan, math.inf
LN2, LN3 = math.log(2), math.log(3)

# probabilities; w = old / mu is 2 and .5 in the first row, 1 in the third, and the second has nothing sampled
MASK = torch.tensor([[False, True, False, True], [False] * 4, [True, False, False, False]])
OLD = torch.tensor([[NAN, 0.8, NAN, 0.25], [NAN] * 4, [0.5, NAN, NAN, NAN]], dtype=torch.float64).log()
MU = torch.tensor([[INF, 0.4, INF, 0.5], [INF] * 4, [0.5, INF, INF, INF]], dtype=torch.float64).log()
TURNS = torch.tensor([[0, 0, 1, 1], [0] * 4, [0, 1, -1, -1]])


def measured(**knobs):
    return mismatch(OLD, MU, MASK, TURNS, **knobs)


def test_mismatch_by_hand():
    got = measured()
    # log w: ln 2, -ln 2, 0
    expected = {
        "rollout_corr/kl": 0.0,
        "rollout_corr/k3_kl": ((2 - 1 - LN2) + (0.5 - 1 + LN2)) / 3,
        "rollout_corr/chi2_token": (4 + 0.25 + 1) / 3 - 1,
        "rollout_corr/rollout_is_mean": 3.5 / 3,
        "rollout_corr/rollout_is_max": 2.0,
        "rollout_corr/rollout_is_min": 0.5,
        "rollout_corr/rollout_is_std": math.sqrt(5.25 / 3 - (3.5 / 3) ** 2),
        "rollout_corr/rollout_is_eff_sample_size": 3.5**2 / (3 * 5.25),
        "mismatch/gap_mean": 2 * LN2 / 3,
        "mismatch/gap_max": LN2,
        # rows: old .8 * .25 = .2 and mu .4 * .5 = .2, both of perplexity sqrt(5); the lone token has 2
        "rollout_corr/training_ppl": (math.sqrt(5) + 2) / 2,
        "rollout_corr/training_log_ppl": (math.log(5) / 2 + LN2) / 2,
        "rollout_corr/rollout_ppl": (math.sqrt(5) + 2) / 2,
        "rollout_corr/rollout_log_ppl": (math.log(5) / 2 + LN2) / 2,
        "rollout_corr/log_ppl_diff": 0.0,
        "rollout_corr/log_ppl_abs_diff": 0.0,
        "rollout_corr/log_ppl_diff_max": 0.0,
        "rollout_corr/log_ppl_diff_min": 0.0,
        "rollout_corr/ppl_ratio": 1.0,
        "rollout_corr/chi2_seq": 0.0,
        "mismatch/seq_eff_sample_size": 1.0,
        # |.8 - .4| = .4, |.25 - .5| = .25, 0: mean .65 / 3, variance (.2225 - .65^2 / 3) / 2
        "training/rollout_probs_diff_max": 0.4,
        "training/rollout_probs_diff_mean": 0.65 / 3,
        "training/rollout_probs_diff_std": math.sqrt((0.2225 - 0.65**2 / 3) / 2),
        # old deviates by .85 / 3, -.8 / 3, -.05 / 3 from its mean, mu by -.2 / 3, .1 / 3, .1 / 3
        "training/rollout_actor_probs_pearson_corr": -0.255 / math.sqrt((0.85**2 + 0.8**2 + 0.05**2) * 0.06),
        "mismatch/turn_0": LN2 / 2,
        "mismatch/turn_1": LN2,
    }
    assert got == pytest.approx(expected, abs=1e-12)


def test_mismatch_directed_metrics_by_hand():
    """Row 1: old .5 and mu .25, twice, so that w is 2 and its product 4; row 2: old .1, mu .3, once."""
    old = torch.tensor([[0.5, 0.5], [0.1, 1.0]]).log().double()
    mu = torch.tensor([[0.25, 0.25], [0.3, 1.0]]).log().double()
    got = mismatch(old, mu, torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2, dtype=torch.int64))
    expected = {
        "kl": (LN3 - 2 * LN2) / 3,  # mu - old: -ln 2, -ln 2, ln 3
        "training_ppl": (2 + 10) / 2,
        "rollout_ppl": (4 + 10 / 3) / 2,
        "log_ppl_diff": (LN3 - LN2) / 2,  # rows: ln 2 - ln 4 and ln 10 - ln 10/3
        "log_ppl_abs_diff": (LN3 + LN2) / 2,
        "log_ppl_diff_max": LN3,
        "log_ppl_diff_min": -LN2,
        "ppl_ratio": (0.5 + 3) / 2,
        "k3_kl": (2 * (1 - LN2) + (1 / 3 - 1 + LN3)) / 3,
        "chi2_seq": (4**2 + (1 / 3) ** 2) / 2 - 1,
    }
    assert {k: got[f"rollout_corr/{k}"] for k in expected} == pytest.approx(expected, abs=1e-6)
    assert got["mismatch/seq_eff_sample_size"] == pytest.approx((13 / 3) ** 2 / (2 * 145 / 9), rel=1e-6)


def test_mismatch_pools_late_turns():
    gaps = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 9.0]])
    turns = torch.tensor([[0, 7, 8, 9, 1000, 3]])
    got = mismatch(gaps, torch.zeros(1, 6), torch.tensor([[True] * 5 + [False]]), turns)
    by_turn = {k: v for k, v in got.items() if "turn_" in k}
    assert by_turn == {"mismatch/turn_0": 1, "mismatch/turn_7": 2, "mismatch/turn_8+": 4}  # (3 + 4 + 5) / 3


def test_mismatch_splits_by_source():
    source = torch.tensor([[0, 1, 0, 1], [0] * 4, [5, 0, 0, 0]])
    got = measured(source=source, source_names=("text", "call", "answer"))
    assert {k: v for k, v in got.items() if "source" in k} == pytest.approx({"mismatch/source_call": LN2})
    assert not any("source" in k for k in measured())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-30, 0), min_size=1, max_size=6))
def test_mismatch_of_equal_policies_is_zero(logprobs):
    old = torch.tensor([logprobs])
    got = mismatch(old, old.clone(), torch.ones_like(old).bool(), torch.zeros_like(old).long())
    ones = ("rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size", "ppl_ratio")
    assert all(got[f"rollout_corr/{k}"] == pytest.approx(1) for k in ones)
    zeros = ("kl", "k3_kl", "rollout_is_std", "chi2_token", "chi2_seq", "log_ppl_abs_diff")
    assert all(got[f"rollout_corr/{k}"] == 0 for k in zeros)
    assert got["mismatch/gap_max"] == got["training/rollout_probs_diff_max"] == got["mismatch/turn_0"] == 0
    assert got.get("training/rollout_actor_probs_pearson_corr", 1) == pytest.approx(1)


def test_mismatch_omits_spread_of_a_single_value():
    one, mask = torch.tensor([[-1.0]]), torch.tensor([[True]])
    got = mismatch(one, one - 0.5, mask, torch.zeros(1, 1).long())
    assert {"training/rollout_probs_diff_std", "training/rollout_actor_probs_pearson_corr"}.isdisjoint(got)
    assert all(map(math.isfinite, got.values()))
    same = torch.full((1, 3), -0.1)
    got = mismatch(same, torch.tensor([[-1.0, -2.0, -3.0]]), torch.ones(1, 3).bool(), torch.zeros(1, 3).long())
    assert "training/rollout_probs_diff_std" in got
    assert "training/rollout_actor_probs_pearson_corr" not in got


@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_mismatch_stays_finite_at_absurd_gaps(gap):
    old, mu = torch.tensor([[gap, -1.0], [-1.0, -1.0]]), torch.tensor([[0.0, -1.0], [-1.0, -2.0]])
    got = mismatch(old, mu, torch.ones(2, 2).bool(), torch.zeros(2, 2).long())
    assert all(map(math.isfinite, got.values()))
    assert got["mismatch/gap_max"] == 1e4
    assert got["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(20) if gap > 0 else math.e)


def test_mismatch_of_an_empty_batch_is_empty():
    nothing = torch.zeros_like(MASK)
    assert mismatch(OLD, MU, nothing, TURNS) == {}
    assert correction_metrics(Weights(torch.zeros(3, 4), nothing), nothing) == {}
    assert policy_version_histogram(torch.full((2, 3), -1), 4) == {}


def test_mismatch_tells_gaps_by_age():
    gaps = torch.tensor([[1.0, 2.0, 3.0, 5.0, 9.0]])
    age, turns = torch.tensor([[0, 2, 4, 9, 0]]), torch.zeros(1, 5, dtype=torch.int64)
    got = mismatch(gaps, torch.zeros(1, 5), torch.tensor([[True] * 4 + [False]]), turns, age=age)
    by_age = {name: value for name, value in got.items() if "age_" in name}
    assert by_age == {"mismatch/age_0": 1, "mismatch/age_2": 2, "mismatch/age_4+": 4}


def test_mismatch_takes_float32_and_returns_floats():
    old = OLD.float().requires_grad_()
    got = mismatch(old, MU.float(), MASK, TURNS)
    assert got == pytest.approx(measured(), abs=1e-6)
    assert all(type(v) is float for v in got.values())


# Metrics of corrections


def test_correction_metrics_by_hand():
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [False] * 3])
    keep = torch.tensor([[True, True, False], [True, True, False], [False] * 3, [False] * 3])
    weight = torch.tensor([[2.0, 0.0, 9.0], [1.0, 1.0, NAN], [9.0, NAN, NAN], [NAN] * 3])
    got = correction_metrics(Weights(weight, keep), mask)
    expected = {
        "rollout_corr/rollout_rs_masked_fraction": 2 / 6,
        "rollout_corr/rollout_rs_seq_masked_fraction": 2 / 3,
        "mismatch/weight_mean": 1.0,
        "mismatch/weight_max": 2.0,
        "mismatch/weight_zero_fraction": 1 / 4,
        "mismatch/weight_eff_sample_size": 4**2 / (4 * 6),
    }
    assert got == pytest.approx(expected)


def test_correction_metrics_of_a_rejected_batch():
    mask = MASK
    all_rejected = correction_metrics(Weights(torch.zeros(3, 4), torch.zeros_like(mask)), mask)
    assert all_rejected == {
        "rollout_corr/rollout_rs_masked_fraction": 1,
        "rollout_corr/rollout_rs_seq_masked_fraction": 1,
    }
    masked = token_icepop(torch.full((3, 4), -9.0), torch.zeros(3, 4), mask)
    got = correction_metrics(Weights(masked, mask), mask)
    assert got["rollout_corr/rollout_rs_masked_fraction"] == got["mismatch/weight_mean"] == 0
    assert got["mismatch/weight_zero_fraction"] == 1
    assert "mismatch/weight_eff_sample_size" not in got


# Versions


def test_policy_version_histogram_by_hand():
    # behind by 0, 0, 1, 3, 4, 9, 7 and 0; -1 is not sampled
    versions = torch.tensor([[-1, 9, 9, 8, 6], [5, 0, 2, 9, -1]], dtype=torch.int32)
    assert policy_version_histogram(versions, 9) == {
        "policy_version/staleness_0": 3 / 8,
        "policy_version/staleness_1": 1 / 8,
        "policy_version/staleness_2": 0,
        "policy_version/staleness_3": 1 / 8,
        "policy_version/staleness_4+": 3 / 8,
    }


def test_policy_version_histogram_refuses_future_versions():
    with pytest.raises(ConfigError, match=r"version 3, after current=2"):
        policy_version_histogram(torch.tensor([[-1, 3]]), 2)


# Routes


def test_route_agreement_ignores_expert_order():
    rollout = torch.tensor([[[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [0, 1, 2, -1]]]], dtype=torch.int16)
    training = torch.tensor([[[[3, 2, 1, 0], [4, 9, 8, 7]], [[4, 5, 6, 7], [0, 1, 2, 3]]]], dtype=torch.int16)
    expected = torch.tensor([[[1.0, 0.5], [0.0, NAN]]])
    torch.testing.assert_close(route_agreement(rollout, training), expected, equal_nan=True)
    torch.testing.assert_close(route_agreement(training, rollout), expected, equal_nan=True)


def test_route_agreement_needs_known_routes():
    missing = torch.full((1, 2, 3, 2), -1, dtype=torch.int8)
    assert route_agreement(missing, missing).isnan().all()


def test_route_agreement_refuses_other_shapes():
    with pytest.raises(ConfigError, match=r"\(1, 2, 3, 2\).*\(1, 2, 3, 4\)"):
        route_agreement(torch.zeros(1, 2, 3, 2), torch.zeros(1, 2, 3, 4))


def test_token_agreement_reads_the_previous_position():
    routes = torch.tensor([[[1.0, 0.9, 1.0, 0.0], [1.0, NAN, 1.0, 0.5], [1.0] * 4, [NAN] * 4, [1.0] * 4]])
    # two of four layers; two of the three known; all; none known; the last position's belongs to no token
    expected = torch.tensor([[NAN, 0.5, 2 / 3, 1.0, NAN]])
    torch.testing.assert_close(token_agreement(routes), expected, equal_nan=True)
