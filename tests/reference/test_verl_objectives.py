"""agent_rl.algorithms.objectives and .aggregation against verl.trainer.ppo.core_algos: values and gradients."""

from functools import partial

import pytest
import torch
from tensors import aggregate as aggregated
from tensors import token_loss

from agent_rl.algorithms.aggregation import seq_mean_token_sum_norm
from agent_rl.algorithms.batch import Denominators
from agent_rl.algorithms.corrections import token_tis
from agent_rl.algorithms.objectives.kl import kl_estimate, kl_in_reward
from agent_rl.algorithms.objectives.sequence import gmpo, gspo, gspo_token
from agent_rl.algorithms.objectives.token import cispo, dppo_kl, dppo_tv, ppo_clip, reinforce, sapo
from agent_rl.algorithms.objectives.value import explained_variance, value_loss
from reference.conftest import required, rows, same, slope

verl = required("verl.trainer.ppo.core_algos")
ActorConfig = required("verl.workers.config").ActorConfig

seeds = pytest.mark.parametrize("seed", range(4))
extremes = pytest.mark.parametrize("extreme", [False, True], ids=["", "extreme"])
LENGTH = 24
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MEAN = 1e-8  # verl adds that to the number of a row's tokens


def config(**knobs):
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **knobs)


def aggregate(loss, mask, mode, whole=None):
    chosen = {"name": mode, "length": LENGTH} if mode.endswith("norm") else {"name": mode}
    return aggregated(chosen, loss, mask, whole or Denominators.of(mask))


def ours(objective, batch, mode, weight=1.0):
    """Loss, gradient by theta's log-probabilities, and the share of sampled tokens that count as clipped."""
    theta = batch.theta.clone().requires_grad_()
    token = token_loss(objective, theta, batch.old, batch.mu, batch.advantages, batch.mask)
    loss = aggregate(weight * token.loss, batch.mask, mode)
    return loss.detach(), slope(loss, theta), token.clipped[batch.mask].double().mean()


def theirs(name, batch, mode, *, anchor=None, weight=None, **knobs):
    """The same by verl; the two clip fractions added up."""
    theta = batch.theta.clone().requires_grad_()
    loss, metrics = verl.get_policy_loss_fn(name)(
        batch.old if anchor is None else anchor,
        theta,
        batch.advantages,
        batch.mask.double(),
        loss_agg_mode=mode,
        config=config(global_batch_info={"loss_scale_factor": LENGTH}, **knobs),
        rollout_is_weights=weight,
    )
    clipped = metrics.get("actor/pg_clipfrac", 0.0) + metrics.get("actor/pg_clipfrac_lower", 0.0)
    return loss.detach(), slope(loss, theta), torch.tensor(clipped)


def assert_same(our, their, *, clip_fraction=True):
    same(our[0], their[0], MEAN)
    same(our[1], their[1], MEAN)
    if clip_fraction:
        same(our[2], their[2], 1e-6)


CASES = {
    "ppo": (partial(ppo_clip, dual_clip=3.0), "vanilla", {}),
    "dapo": (
        partial(ppo_clip, clip_high_eps=0.28, dual_clip=10.0),
        "vanilla",
        {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
    ),
    "cispo": (partial(cispo, clip_low_eps=0.2, clip_high_eps=0.28), "cispo", {"clip_ratio_high": 0.28}),
    "cispo without lower bound": (
        partial(cispo, clip_high_eps=4.0),
        "cispo",
        {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
    ),
}


@seeds
@extremes
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("objective", "name", "knobs"), CASES.values(), ids=CASES)
def test_ratio_objectives_to_old_match_verl(seed, extreme, mode, objective, name, knobs):
    batch = rows(seed, extreme=extreme)
    assert_same(ours(objective, batch, mode), theirs(name, batch, mode, **knobs))


@seeds
@extremes
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("objective", "name", "delta"), [(dppo_tv, "dppo_tv", 0.1), (dppo_kl, "dppo_kl", 0.02)], ids=["tv", "kl"]
)
def test_ratio_objectives_to_mu_match_verl(seed, extreme, mode, objective, name, delta):
    """Old is mu here, as in the paper; in verl that is its bypass mode."""
    batch = rows(seed, extreme=extreme)
    knobs = {"clip_ratio_low": delta, "clip_ratio_high": 2 * delta, "clip_ratio_c": 20.0}
    our = ours(partial(objective, delta_low=delta, delta_high=2 * delta), batch, mode)
    their = theirs(name, batch, mode, anchor=batch.mu, **knobs)
    assert_same(our, their)
    assert 0 < our[2] < 1


def test_verl_caps_dppo_at_3_by_default():
    """Its code falls back to 20 where the config has no clip_ratio_c; ActorConfig always has one, PPO's 3."""
    batch = rows(0, spread=1.5)
    their = theirs("dppo_tv", batch, "token-mean", anchor=batch.mu)
    assert_same(ours(partial(dppo_tv, ratio_cap=3.0), batch, "token-mean"), their)
    assert (ours(dppo_tv, batch, "token-mean")[0] - their[0]).abs() > 0.01


@seeds
@extremes
def test_sapo_matches_verl(seed, extreme):
    batch = rows(seed, extreme=extreme)
    their = theirs("sapo", batch, "token-mean")  # verl aggregates SAPO by sequence, whatever the mode
    assert_same(ours(sapo, batch, "seq-mean-token-mean"), their)


@seeds
@pytest.mark.parametrize("mode", MODES)
def test_gspo_token_matches_verl(seed, mode):
    batch = rows(seed, spread=0.01)
    knobs = {"clip_ratio_low": 2e-3, "clip_ratio_high": 3e-3}
    our = ours(partial(gspo_token, clip_low_eps=2e-3, clip_high_eps=3e-3), batch, mode)
    assert_same(our, theirs("gspo", batch, mode, **knobs))
    assert 0 < our[2] < 1


@seeds
def test_gspo_by_sequence_matches_verl(seed):
    """With one advantage a row the two forms are the same under the papers' aggregation."""
    batch = rows(seed, spread=0.01)
    knobs = {"clip_ratio_low": 2e-3, "clip_ratio_high": 3e-3}
    our = ours(partial(gspo, clip_low_eps=2e-3, clip_high_eps=3e-3), batch, "seq-mean-token-mean")
    assert_same(our, theirs("gspo", batch, "seq-mean-token-mean", **knobs))


def test_verl_clamps_gspo_log_ratio_at_10():
    """Seen only where nothing is clipped at all: a negative advantage."""
    batch = rows(0, singletons=False)
    batch.theta[batch.mask], batch.old[batch.mask] = -1.0, -13.0
    batch.advantages[batch.mask] = -1.0
    our, their = ours(gspo_token, batch, "token-mean"), theirs("gspo", batch, "token-mean")
    assert our[0].log().item() == pytest.approx(12)
    assert their[0].log().item() == pytest.approx(10)
    assert our[1].any()
    assert not their[1].any(), "beyond its clamp verl has no gradient"


@seeds
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_gmpo_matches_verl(seed, spread):
    batch = rows(seed, spread=spread)
    their = theirs("geo_mean", batch, "not looked at", clip_ratio_low=0.4, clip_ratio_high=0.3)
    our = ours(partial(gmpo, clip_high_eps=0.3), batch, "seq-mean-token-mean")
    share = batch.mask.any(-1).double().mean()  # verl's mean counts rows with nothing sampled
    assert share < 1
    # verl also counts clips that would raise the objective, and are not applied
    assert_same((our[0] * share, our[1] * share), their, clip_fraction=False)
    assert our[2] <= their[2] + 1e-6


@seeds
@pytest.mark.parametrize("mode", MODES)
def test_reinforce_matches_verl(seed, mode):
    batch = rows(seed)
    theta = batch.theta.clone().requires_grad_()
    loss, _ = verl.compute_policy_loss_reinforce(
        batch.mu,
        theta,
        batch.advantages,
        batch.mask.double(),
        loss_agg_mode=mode,
        config=config(global_batch_info={"loss_scale_factor": LENGTH}),
    )
    assert_same(ours(reinforce, batch, mode), (loss.detach(), slope(loss, theta)), clip_fraction=False)


@seeds
@pytest.mark.parametrize(
    ("objective", "name"),
    [(partial(ppo_clip, dual_clip=3.0), "vanilla"), (partial(cispo, clip_low_eps=0.2, clip_high_eps=0.2), "cispo")],
    ids=["ppo", "cispo"],
)
def test_weights_multiply_the_loss_of_a_token(seed, objective, name):
    batch = rows(seed)
    weight = token_tis(batch.old, batch.mu, batch.mask)
    assert_same(ours(objective, batch, "token-mean", weight), theirs(name, batch, "token-mean", weight=weight))


# Aggregation


@seeds
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up_to_the_batch(seed, mode):
    """With the counts of the whole batch; without them verl's shares are means of their own, and don't add up."""
    batch = rows(seed)
    loss, mask, whole = batch.values, batch.mask, Denominators.of(batch.mask)
    counts = {"batch_num_tokens": whole.tokens, "global_batch_size": whole.sequences, "loss_scale_factor": LENGTH}
    cuts = [slice(0, 3), slice(3, 4), slice(4, 10)]
    parts = [aggregate(loss[cut], mask[cut], mode, whole) for cut in cuts]
    their_parts = [verl.agg_loss(loss[cut], mask[cut].double(), mode, **counts) for cut in cuts]
    for part, other in zip(parts, their_parts, strict=True):
        same(part, other, MEAN)
    same(sum(parts), aggregate(loss, mask, mode), MEAN)
    uncounted = sum(verl.agg_loss(loss[cut], mask[cut].double(), mode, loss_scale_factor=LENGTH) for cut in cuts)
    assert mode == "token-sum" or (uncounted - sum(parts)).abs() > 1e-3


def test_verl_mean_over_rows_counts_empty_rows():
    """Its global_batch_size is the number of rows in the trainer, with those that sampled nothing: the mean shrinks."""
    batch = rows(0)
    mask = batch.mask.double()
    loss = verl.agg_loss(batch.values, mask, "seq-mean-token-mean", global_batch_size=len(mask))
    share = batch.mask.any(-1).double().mean()
    same(aggregate(batch.values, batch.mask, "seq-mean-token-mean") * share, loss, MEAN)


def test_verl_constant_length_defaults_to_padded_width():
    batch = rows(0)
    loss = verl.agg_loss(batch.values, batch.mask.double(), "seq-mean-token-sum-norm")
    whole = Denominators.of(batch.mask)
    same(seq_mean_token_sum_norm(batch.values, batch.mask, whole, length=batch.mask.shape[1]), loss)


# KL


@seeds
@extremes
@pytest.mark.parametrize(
    ("kind", "name"),
    [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k1+", "k1+"), ("k3+", "k3+"), ("abs", "abs")],
)
def test_kl_matches_verl(seed, extreme, kind, name):
    batch = rows(seed, extreme=extreme)
    theta, again = (batch.theta.clone().requires_grad_() for _ in range(2))
    our = kl_estimate(theta, batch.reference, kind=kind)
    their = verl.kl_penalty(again, batch.reference, name)
    same(our, their)
    same(slope(our.sum(), theta), slope(their.sum(), again))


@seeds
def test_kl_in_reward_matches_verl(seed):
    trainer, protocol = required("verl.trainer.ppo.ray_trainer"), required("verl")
    batch = rows(seed)
    garbage = torch.where(batch.mask, batch.old, -5.0)
    data = protocol.DataProto.from_dict(
        {
            "response_mask": batch.mask.double(),
            "token_level_scores": batch.terminal,
            "old_log_probs": garbage,
            "ref_log_prob": batch.reference,
        }
    )
    data, _ = trainer.apply_kl_penalty(data, verl.FixedKLController(0.1), "low_var_kl")
    our = kl_in_reward(batch.terminal, garbage, batch.reference, batch.mask, coefficient=0.1, kind="k3")
    same(our, data.batch["token_level_rewards"])
    # core_algos' own has no mask: it penalises the environment's tokens too
    unmasked = verl.compute_rewards(batch.terminal, garbage, batch.reference, 0.1)
    linear = kl_in_reward(batch.terminal, garbage, batch.reference, batch.mask, coefficient=0.1, kind="k1")
    same(linear[batch.mask], unmasked[batch.mask])
    assert (unmasked - linear)[~batch.mask].min() > 0.4


# Critic


@seeds
@pytest.mark.parametrize("mode", MODES)
def test_value_loss_matches_verl(seed, mode):
    batch = rows(seed, spread=0.5)
    ours_, theirs_ = (batch.theta.clone().requires_grad_() for _ in range(2))
    token, clipped = value_loss(ours_, batch.old, batch.values, batch.mask, clip_eps=0.2)
    loss = aggregate(token, batch.mask, mode)
    their, fraction = verl.compute_value_loss(
        theirs_, batch.values, batch.old, batch.mask.double(), 0.2, mode, loss_scale_factor=LENGTH
    )
    assert_same((loss.detach(), slope(loss, ours_)), (their.detach(), slope(their, theirs_)), clip_fraction=False)
    same(clipped[batch.mask].double().mean(), fraction, 1e-6)
    assert 0 < fraction < 1


def test_explained_variance_matches_verl_at_small_returns():
    """verl adds 1e-5 to the variance of the returns: those of this critic look explained, and are not."""
    batch = rows(0)
    returns, values = 1e-3 * batch.values, 1e-3 * batch.values.flip(0)
    target, predicted = returns[batch.mask], values[batch.mask]
    in_verl = 1 - (target - predicted).var() / (target.var() + 1e-5)  # its metric_utils.compute_data_metrics
    assert in_verl > 0.7
    assert explained_variance(values, returns, batch.mask) < 0
