"""agent_rl.algorithms.corrections and .mismatch against verl.trainer.ppo.rollout_corr_helper."""

import math
from functools import partial

import pytest
import torch

from agent_rl.algorithms.corrections import (
    Weights,
    batch_normalised,
    geometric_rejection,
    k3_rejection,
    rollout_gap,
    sequence_normalised,
    sequence_rejection,
    sequence_tis,
    token_icepop,
    token_rejection,
    token_tis,
)
from agent_rl.algorithms.diagnostics import correction_metrics, mismatch
from reference.conftest import required, rows, same

verl = required("verl.trainer.ppo.rollout_corr_helper")

seeds = pytest.mark.parametrize("seed", range(4))
extremes = pytest.mark.parametrize("extreme", [False, True], ids=["", "extreme"])
spreads = pytest.mark.parametrize("spread", [0.02, 0.5, 2.0])
MEAN = 1e-7  # verl's masked_mean adds 1e-8 to the count


def gaps(batch):
    return rollout_gap(batch.old, batch.mu, batch.mask)


def verl_weights(batch, **options):
    return verl.compute_rollout_correction_weights(gaps(batch), batch.mask.double(), **options)[0]


def verl_keeps(batch, rule, threshold):
    mask, _ = verl.compute_rollout_rejection_mask(gaps(batch), batch.mask.double(), rule, threshold)
    return mask.bool()


# Weights


@seeds
@spreads
@extremes
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("ours", "level"), [(token_tis, "token"), (sequence_tis, "sequence")])
def test_truncated_importance_sampling_matches_verl(seed, spread, extreme, normalise, ours, level):
    batch = rows(seed, spread=spread, extreme=extreme)
    weight = ours(batch.old, batch.mu, batch.mask, cap=2.0)
    if normalise:
        by_row = torch.arange(len(batch.mask))
        by_token, mask = batch_normalised(weight, batch.mask), batch.mask
        weight = by_token if level == "token" else sequence_normalised(weight, mask, by_row)
    options = {"rollout_is": level, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": normalise}
    same(weight, verl_weights(batch, **options), MEAN)
    assert weight.any()
    assert not weight[~batch.mask].any()


@seeds
@spreads
@extremes
def test_icepop_matches_verl(seed, spread, extreme):
    batch = rows(seed, spread=spread, extreme=extreme)
    weight = token_icepop(batch.old, batch.mu, batch.mask, low=0.5, high=5.0)
    same(weight, verl_weights(batch, rollout_is="token", rollout_is_threshold="0.5_5.0"))


@seeds
def test_normalised_icepop_matches_verl(seed):
    """verl's order: first the bounds, then the mean, the zeros in it."""
    batch = rows(seed, spread=1.0)
    weight = token_icepop(batch.old, batch.mu, batch.mask)
    options = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True}
    same(batch_normalised(weight, batch.mask), verl_weights(batch, **options), MEAN)


def test_verl_weights_take_masks_of_any_dtype():
    """The other tests pass a mask of floats, which is no special case."""
    batch = rows(0, spread=1.0)
    for mask in (batch.mask, batch.mask.long(), batch.mask.float()):
        weight, _ = verl.compute_rollout_correction_weights(gaps(batch), mask, "token", 2.0)
        same(token_tis(batch.old, batch.mu, batch.mask), weight)


# Rejection: verl's k1 bounds are on mu / old, ours on old / mu


def inverse(low, high):
    return f"{1 / high!r}_{1 / low!r}"


REJECTIONS = {
    "token": (partial(token_rejection, low=0.5, high=3.0), "token_k1", inverse(0.5, 3.0)),
    "sequence": (partial(sequence_rejection, low=0.4, high=3.0), "seq_sum_k1", inverse(0.4, 3.0)),
    "geometric": (partial(geometric_rejection, low=0.98, high=1.05), "seq_mean_k1", inverse(0.98, 1.05)),
    "mean k3": (partial(k3_rejection, max_k3=0.05), "seq_mean_k3", 0.05),
    "worst k3": (partial(k3_rejection, max_k3=0.2, over="max"), "seq_max_k3", 0.2),
}


@seeds
@spreads
@pytest.mark.parametrize(("ours", "rule", "threshold"), REJECTIONS.values(), ids=REJECTIONS)
def test_rejection_matches_verl(seed, spread, ours, rule, threshold):
    batch = rows(seed, spread=spread)
    keep = ours(batch.old, batch.mu, batch.mask)
    assert keep.tolist() == verl_keeps(batch, rule, threshold).tolist()


@pytest.mark.parametrize(("ours", "rule", "threshold"), REJECTIONS.values(), ids=REJECTIONS)
def test_rejection_rejects_and_keeps(ours, rule, threshold):
    """The comparisons above are not vacuous: every rule both keeps and rejects tokens of their batches."""
    kept = [
        verl_keeps(rows(s, spread=w), rule, threshold)[rows(s, spread=w).mask] for s in range(4) for w in (0.02, 0.5)
    ]
    assert 0.05 < torch.cat(kept).double().mean() < 0.98


@seeds
@pytest.mark.parametrize(("ours", "rule", "threshold"), [REJECTIONS[x] for x in ("token", "mean k3", "worst k3")])
def test_rejection_matches_verl_at_extreme_gaps(seed, ours, rule, threshold):
    batch = rows(seed, extreme=True)
    assert ours(batch.old, batch.mu, batch.mask).tolist() == verl_keeps(batch, rule, threshold).tolist()


def test_verl_rejection_bounds_are_on_the_inverse():
    """verl is not consistent: its IcePop bounds are on old / mu."""
    ratio = torch.tensor([[0.1, 0.2, 0.25, 0.5, 1.0, 1.9, 3.0, 4.9, 6.0]], dtype=torch.float64)
    mask = torch.ones_like(ratio, dtype=torch.bool)
    old, mu = ratio.log(), torch.zeros_like(ratio)
    rejected, _ = verl.compute_rollout_rejection_mask(old, mask.double(), "token_k1", "0.5_5.0")
    icepop, _ = verl.compute_rollout_correction_weights(old, mask.double(), "token", "0.5_5.0")
    assert rejected.bool().tolist() == [[False, True, True, True, True, True, False, False, False]]
    assert (icepop > 0).tolist() == [[False, False, False, True, True, True, True, True, False]]
    ours = token_rejection(old, mu, mask, low=0.5, high=5.0)
    assert ours.tolist() == (icepop > 0).tolist()
    assert token_rejection(old, mu, mask, low=0.2, high=2.0).tolist() == rejected.bool().tolist()


@pytest.mark.parametrize(("ours", "rule"), [(sequence_rejection, "seq_sum_k1"), (geometric_rejection, "seq_mean_k1")])
def test_verl_clamps_tokens_before_the_row_sum(ours, rule):
    """Both rows add up to nothing. In verl the second one adds up to 20 - 60."""
    mask = torch.ones(2, 4, dtype=torch.bool)
    gap = torch.tensor([[60.0, -60, 0, 0], [60.0, -20, -20, -20]], dtype=torch.float64)
    keep = ours(gap, torch.zeros_like(gap), mask, low=0.5, high=2.0)
    theirs, _ = verl.compute_rollout_rejection_mask(gap, mask.double(), rule, "0.5_2.0")
    assert keep.all(-1).tolist() == [True, True]
    assert theirs.bool().all(-1).tolist() == [True, False]


# Metrics


@seeds
@spreads
def test_mismatch_metrics_match_verl(seed, spread):
    batch = rows(seed, spread=spread, empty=False)
    turns = torch.zeros_like(batch.mask, dtype=torch.int64)
    ours = mismatch(batch.old, batch.mu, batch.mask, turns)
    _, _, theirs = verl.compute_rollout_correction_and_rejection_mask(
        batch.old, batch.mu, batch.mask.double(), rollout_is="token", rollout_is_threshold=1e6
    )
    named = {name for name in ours if name.startswith("rollout_corr/")}
    assert named <= theirs.keys()
    assert len(named) == 18
    for name in named:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_mismatch_metrics_differ_from_verl_at_edges():
    batch = rows(0, spread=1.5)
    turns = torch.zeros_like(batch.mask, dtype=torch.int64)
    ours = mismatch(batch.old, batch.mu, batch.mask, turns)
    _, _, theirs = verl.compute_rollout_correction_and_rejection_mask(
        batch.old, batch.mu, batch.mask.double(), rollout_is="token", rollout_is_threshold=2.0
    )
    # verl's are of the truncated weights: their effective sample size looks better than it is
    assert theirs["rollout_corr/rollout_is_max"] == 2.0 < ours["rollout_corr/rollout_is_max"]
    assert theirs["rollout_corr/rollout_is_eff_sample_size"] > ours["rollout_corr/rollout_is_eff_sample_size"] + 0.1
    # a row that sampled nothing has perplexity 1 in verl's mean
    rows_, sampled = len(batch.mask), int(batch.mask.any(-1).sum())
    theirs_mean = (ours["rollout_corr/training_ppl"] * sampled + (rows_ - sampled)) / rows_
    assert theirs["rollout_corr/training_ppl"] == pytest.approx(theirs_mean, rel=1e-5)
    # k3 is clamped here, and is infinite in verl
    far = torch.where(batch.mask, batch.mu + 800.0, 0.0)
    assert mismatch(far, batch.mu, batch.mask, turns)["rollout_corr/k3_kl"] == pytest.approx(math.exp(20) - 21)
    assert verl.compute_offpolicy_metrics(far, batch.mu, batch.mask.double())["k3_kl"] == float("inf")


@seeds
def test_probability_metrics_match_verl(seed):
    debug, protocol = required("verl.utils.debug.metrics"), required("verl")
    batch = rows(seed, spread=0.5)
    data = {
        "rollout_log_probs": batch.mu,
        "old_log_probs": batch.old,
        "response_mask": batch.mask.long(),
        "responses": batch.mask.long(),
    }
    theirs = debug.calculate_debug_metrics(protocol.DataProto.from_dict(data))
    ours = mismatch(batch.old, batch.mu, batch.mask, torch.zeros_like(batch.mask, dtype=torch.int64))
    for name in (
        "training/rollout_probs_diff_max",
        "training/rollout_probs_diff_mean",
        "training/rollout_probs_diff_std",
        "training/rollout_actor_probs_pearson_corr",
    ):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name


@seeds
@pytest.mark.parametrize(("ours", "rule", "threshold"), REJECTIONS.values(), ids=REJECTIONS)
def test_rejection_metrics_match_verl(seed, ours, rule, threshold):
    batch = rows(seed, spread=0.2)
    _, theirs = verl.compute_rollout_rejection_mask(gaps(batch), batch.mask.double(), rule, threshold)
    weights = Weights(batch.mask.double(), ours(batch.old, batch.mu, batch.mask))
    found = correction_metrics(weights, batch.mask)
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        theirs["rollout_rs_masked_fraction"], abs=1e-6
    )
    share = batch.mask.any(-1).double().mean().item()  # verl counts rows without anything sampled, as kept
    by_row = found["rollout_corr/rollout_rs_seq_masked_fraction"] * share
    assert by_row == pytest.approx(theirs["rollout_rs_seq_masked_fraction"], abs=1e-6)
