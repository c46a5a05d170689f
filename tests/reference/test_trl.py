"""agent_rl.algorithms against TRL's trainers: their loss and advantage code, run on made-up rows without any model."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensors import aggregate as aggregated
from tensors import token_loss

from agent_rl.algorithms.advantages import episode as outcome
from agent_rl.algorithms.batch import Denominators
from agent_rl.algorithms.corrections import sequence_rejection, sequence_tis, token_icepop, token_tis
from agent_rl.algorithms.objectives.kl import kl_estimate, unbiased_kl
from agent_rl.algorithms.objectives.sequence import gmpo, gspo, luspo, off_policy_sequences
from agent_rl.algorithms.objectives.token import cispo, ppo_clip, sapo
from reference.conftest import required, rows, same, slope
from reference.trl_trainers import scored, trainer

GRPOTrainer = required("trl.trainer.grpo_trainer").GRPOTrainer
RLOOTrainer = required("trl.trainer.rloo_trainer").RLOOTrainer

seeds = pytest.mark.parametrize("seed", range(4))
LENGTH = 24
FLOAT32 = 1e-5  # where TRL has torch's default dtype: temperatures, Bessel's corrections, log-probabilities under mu


# Losses


def row_advantages(batch):
    return batch.advantages.sum(-1) / batch.mask.sum(-1).clamp(min=1)


def trl_loss(batch, loss_type, *, cls=GRPOTrainer, level="token", args=None, weights=None, **settings):
    """Loss and gradient by theta's log-probabilities; the environment's tokens are masked as TRL does after a tool.

    `weights` are TRL's importance-sampling ratios, of tokens or of rows.
    """
    theta = batch.theta.clone().requires_grad_()
    options = {"delta": None, "use_bias_correction_kl": True, "steps_per_generation": 1}
    options |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05} | (args or {})
    knobs = {"epsilon_low": 0.2, "epsilon_high": 0.2, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0}
    made = trainer(
        cls,
        args=SimpleNamespace(**options),
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (theta, torch.zeros_like(theta), None),
        **(knobs | settings),
    )
    prompt = torch.zeros(len(theta), 1, dtype=torch.long)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "advantages": row_advantages(batch)}
    inputs |= {"completion_ids": torch.zeros(theta.shape, dtype=torch.long), "completion_mask": torch.ones(theta.shape)}
    inputs |= {"tool_mask": batch.mask.double(), "num_items_in_batch": batch.mask.sum().double()}
    inputs |= {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.reference}
    inputs |= {"sampling_per_token_logps": batch.mu}
    if weights is not None:
        made.use_vllm = made.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = weights
    loss = made._compute_loss(made.model, inputs)
    return loss.detach(), slope(loss, theta)


def our_loss(batch, objective, mode, *, keep=None, kl=None):
    theta = batch.theta.clone().requires_grad_()
    loss = token_loss(objective, theta, batch.old, batch.mu, batch.advantages, batch.mask).loss
    loss = loss if keep is None else loss * keep[:, None]
    loss = loss if kl is None else loss + kl(theta)
    chosen = {"name": mode, "length": LENGTH} if mode.endswith("norm") else {"name": mode}
    total = aggregated(chosen, loss, batch.mask, Denominators.of(batch.mask))
    return total.detach(), slope(total, theta)


def assert_same(ours, theirs, tolerance=1e-10):
    for our, their in zip(ours, theirs, strict=True):
        same(our, their, tolerance)


higher = {"epsilon_low": 0.2, "epsilon_high": 0.28}
dapo = partial(ppo_clip, clip_high_eps=0.28)
narrow = {"epsilon_low": 2e-3, "epsilon_high": 3e-3, "level": "sequence"}
CASES = {
    "grpo": (ppo_clip, "seq-mean-token-mean", "grpo", {}),
    "bnpo": (dapo, "token-mean", "bnpo", higher),
    "dapo": (dapo, "token-mean", "dapo", higher),
    "dr_grpo": (ppo_clip, "seq-mean-token-sum-norm", "dr_grpo", {}),
    "two-sided": (partial(ppo_clip, dual_clip=3.0), "token-mean", "dapo", {"args": {"delta": 3.0}}),
    "cispo": (partial(cispo, clip_high_cap=1.3), "token-mean", "cispo", {"epsilon_high": 1.3}),
    "gspo": (partial(gspo, clip_low_eps=2e-3, clip_high_eps=3e-3), "seq-mean-token-mean", "grpo", narrow),
    "luspo": (partial(luspo, clip_low_eps=2e-3, clip_high_eps=3e-3), "seq-mean-token-mean", "luspo", narrow),
}


@seeds
@pytest.mark.parametrize("spread", [0.01, 0.3, 1.5])
@pytest.mark.parametrize(("objective", "mode", "loss_type", "knobs"), CASES.values(), ids=CASES)
def test_objectives_match_trl(seed, spread, objective, mode, loss_type, knobs):
    batch = rows(seed, spread=spread, empty=False)
    assert_same(our_loss(batch, objective, mode), trl_loss(batch, loss_type, **knobs))


@seeds
def test_sapo_matches_trl(seed):
    batch = rows(seed, empty=False)
    assert_same(our_loss(batch, sapo, "seq-mean-token-mean"), trl_loss(batch, "sapo"), FLOAT32)


@seeds
@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_gmpo_matches_trl(seed, spread):
    gmpo_trainer = required("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    batch = rows(seed, spread=spread, empty=False)
    theirs = trl_loss(batch, None, cls=gmpo_trainer, epsilon_low=0.4, epsilon_high=0.3)
    assert_same(our_loss(batch, partial(gmpo, clip_high_eps=0.3), "seq-mean-token-mean"), theirs)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "luspo"])
def test_trl_mean_over_rows_counts_empty_rows(name):
    batch = rows(0)
    objective, mode, loss_type, knobs = CASES[name]
    share = batch.mask.any(-1).double().mean()
    assert share < 1
    loss, gradient = our_loss(batch, objective, mode)
    assert_same((loss * share, gradient * share), trl_loss(batch, loss_type, **knobs))


def test_trl_epsilon_high_of_cispo_is_a_cap():
    """The same number as 1 + eps is another algorithm."""
    batch = rows(0, empty=False)
    theirs = trl_loss(batch, "cispo", epsilon_high=0.28)
    assert_same(our_loss(batch, partial(cispo, clip_high_cap=0.28), "token-mean"), theirs)
    assert (our_loss(batch, partial(cispo, clip_high_eps=0.28), "token-mean")[1] - theirs[1]).abs().max() > 1e-3


def test_trl_does_not_clamp_log_ratios():
    batch = rows(0, empty=False)
    batch.theta[batch.mask], batch.old[batch.mask], batch.advantages[batch.mask] = -1.0, -31.0, -1.0
    assert our_loss(batch, ppo_clip, "token-mean")[0].log().item() == pytest.approx(20)
    assert trl_loss(batch, "dapo")[0].log().item() == pytest.approx(30)


@seeds
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_unbiased_kl_matches_trl(seed, level):
    """With the token's ratio; TRL uses the sequence's ratio at sequence level, so the gradients differ there."""
    batch = rows(seed, empty=False)
    kl = partial(unbiased_kl, behavior_logprobs=batch.old, reference_logprobs=batch.reference)
    objective = ppo_clip if level == "token" else partial(gspo, clip_low_eps=0.2, clip_high_eps=0.2)
    ours = our_loss(batch, objective, "seq-mean-token-mean", kl=lambda theta: 0.1 * kl(theta))
    theirs = trl_loss(batch, "grpo", level=level, beta=0.1)
    if level == "token":
        assert_same(ours, theirs)
    else:
        assert (ours[1] - theirs[1]).abs().max() > 1e-4


@seeds
def test_k3_matches_trl(seed):
    batch = rows(seed, empty=False)
    ours = our_loss(
        batch, ppo_clip, "token-mean", kl=lambda theta: 0.1 * kl_estimate(theta, batch.reference, kind="k3")
    )
    assert_same(ours, trl_loss(batch, "dapo", beta=0.1, args={"use_bias_correction_kl": False}))


@seeds
def test_off_policy_sequences_match_trl(seed):
    batch = rows(seed, empty=False)
    dropped = off_policy_sequences(batch.theta, batch.mu, batch.advantages, batch.mask, delta=0.1)
    ours = our_loss(batch, ppo_clip, "token-mean", keep=~dropped)
    assert_same(ours, trl_loss(batch, "dapo", off_policy_mask_threshold=0.1))
    kept = GRPOTrainer.get_off_policy_mask(row_advantages(batch)[:, None], batch.theta, batch.mu, batch.mask, 0.1)
    assert kept.bool()[:, 0].tolist() == (~dropped).tolist()


def test_off_policy_sequences_drop_some_rows():
    batches = [rows(seed, empty=False) for seed in range(4)]
    dropped = [off_policy_sequences(b.theta, b.mu, b.advantages, b.mask, delta=0.1) for b in batches]
    assert 0 < torch.cat(dropped).double().mean() < 0.5


# Advantages, and weights between training and inference

ROWS = (torch.ones(12, 2, dtype=torch.bool), *torch.zeros(2, 12, 2))


def graded(seed):
    """Scores of three groups of 4: any, one of them not scored, and all the same."""
    scores = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scores[5], scores[8:] = torch.nan, 0.1 + 0.2
    return scores, torch.arange(12) // 4


@seeds
@pytest.mark.parametrize("std", [True, False])
def test_group_relative_matches_trl(seed, std):
    scores, groups = graded(seed)
    theirs = scored(GRPOTrainer, scores[:, None], *ROWS, scale_rewards="group" if std else "none")
    ours = outcome.group_relative(scores, groups, std=std, eps=1e-4)
    same(ours.nan_to_num(0.0), theirs["advantages"], FLOAT32)
    assert ours[5].isnan()


@seeds
def test_leave_one_out_matches_trl(seed):
    scores, groups = graded(seed)
    theirs = scored(RLOOTrainer, scores[:, None], *ROWS)
    same(outcome.leave_one_out(scores, groups).nan_to_num(0.0), theirs["advantages"])


@seeds
def test_decoupled_matches_trl(seed):
    scores, groups = graded(seed)
    components = torch.stack([scores.nan_to_num(0.3), scores.nan_to_num(0.3).flip(0) ** 2], -1)
    weights = torch.tensor([1.0, 0.4], dtype=torch.float64)
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    theirs = scored(GRPOTrainer, components, *ROWS, **options)
    same(outcome.decoupled(components, weights, groups, eps=1e-4), theirs["advantages"], FLOAT32)


def trl_weights(batch, mode, low, high):
    """What TRL multiplies the losses of a batch with for vLLM's mismatch, by token or by row."""
    options = {"correction": True, "mode": mode, "clip_min": low, "clip_max": high}
    settings = {f"vllm_importance_sampling_{name}": value for name, value in options.items()} | {"use_vllm": True}
    found = scored(GRPOTrainer, batch.scores[:, None], batch.mask, batch.old, batch.mu, **settings)
    return found["importance_sampling_ratio"]


@seeds
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_weights_match_trl(seed, spread):
    batch = rows(seed, spread=spread, empty=False, singletons=False)

    def theirs(mode, low, high):
        return torch.where(batch.mask, trl_weights(batch, mode, low, high), 0.0)

    policies = batch.old, batch.mu, batch.mask
    same(token_tis(*policies, cap=2.0), theirs("token_truncate", None, 2.0), FLOAT32)
    same(token_icepop(*policies, low=0.5, high=5.0), theirs("token_mask", 0.5, 5.0), FLOAT32)
    same(sequence_tis(*policies, cap=2.0), theirs("sequence_truncate", None, 2.0), FLOAT32)
    # TRL's default mode
    kept = sequence_rejection(*policies, low=0.0, high=3.0)
    same(sequence_tis(*policies, cap=3.0) * kept, theirs("sequence_mask", None, 3.0), FLOAT32)
