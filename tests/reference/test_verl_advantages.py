"""agent_rl.algorithms.advantages against verl.trainer.ppo.core_algos: equal numbers, and the known differences."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent_rl.algorithms.advantages import episode as outcome
from agent_rl.algorithms.advantages.token import (
    gae,
    optimal_baseline,
    path_variance,
    reinforce_pp,
    returns_to_go,
    settle,
    whiten,
)
from reference.conftest import required, rows, same

verl = required("verl.trainer.ppo.core_algos")
functional = required("verl.utils.torch_functional")

seeds = pytest.mark.parametrize("seed", range(4))
FLOAT32 = 2e-5  # where verl makes tensors of torch's default dtype
MEAN = 1e-8  # verl's masked_mean adds that to the number of tokens


def on_tokens(per_row, mask):
    return torch.where(mask, per_row[:, None], 0.0)


def mask_of(batch):
    return batch.mask.double()


# Outcomes. Scores are put on the last sampled token, as verl sums a row's rewards; a row without any has none.


def graded(batch):
    """A batch and its scores as verl sees them: 0 for a row that sampled nothing."""
    return batch.terminal, batch.terminal.sum(-1)


@seeds
@pytest.mark.parametrize("std", [True, False])
def test_group_relative_matches_verl(seed, std):
    batch = rows(seed, singletons=False)
    rewards, scores = graded(batch)
    ours = on_tokens(outcome.group_relative(scores, batch.groups, std=std), batch.mask)
    options = {"index": batch.index, "norm_adv_by_std_in_grpo": std}
    same(ours, verl.compute_grpo_outcome_advantage(rewards, mask_of(batch), **options)[0])
    # this one groups in float32
    same(ours, verl.compute_grpo_vectorized_outcome_advantage(rewards, mask_of(batch), **options)[0], FLOAT32)


def test_group_relative_differs_for_a_single_episode():
    scores, groups = torch.tensor([0.7, 1.0, 3.0], dtype=torch.float64), torch.tensor([0, 1, 1])
    rewards, mask = scores[:, None], torch.ones(3, 1, dtype=torch.float64)
    ours = outcome.group_relative(scores, groups)
    theirs, _ = verl.compute_grpo_outcome_advantage(rewards, mask, groups.numpy())
    same(ours[1:], theirs[1:, 0])
    assert ours[0] == 0
    assert theirs[0].item() == pytest.approx(0.7, abs=1e-5)  # mean 0 and deviation 1: it learns from every success


@seeds
def test_leave_one_out_matches_verl(seed):
    batch = rows(seed)
    rewards, scores = graded(batch)
    ours = on_tokens(outcome.leave_one_out(scores, batch.groups), batch.mask)
    same(ours, verl.compute_rloo_vectorized_outcome_advantage(rewards, mask_of(batch), batch.index)[0])
    looped, _ = verl.compute_rloo_outcome_advantage(rewards, mask_of(batch), batch.index)
    single = torch.tensor([g in (5, 11) for g in batch.groups])
    same(ours[~single], looped[~single])
    same(on_tokens(scores, batch.mask)[single], looped[single])  # verl's two disagree: the loop has the score itself
    assert not ours[single].any()


@seeds
def test_length_weighted_matches_verl(seed):
    batch = rows(seed)
    rewards, scores = graded(batch)
    ours = on_tokens(outcome.length_weighted(scores, batch.groups, batch.mask.sum(-1)), batch.mask)
    theirs, _ = verl.compute_opo_outcome_advantage(rewards, mask_of(batch), batch.index)
    single = torch.tensor([g in (5, 11) for g in batch.groups])
    same(ours[~single], theirs[~single])
    same(on_tokens(scores, batch.mask)[single], theirs[single])
    assert not ours[single].any()


@seeds
def test_over_greedy_matches_verl(seed):
    batch = rows(seed)
    rewards, scores = graded(batch)
    greedy = batch.scores.flip(0)
    theirs, _ = verl.compute_remax_outcome_advantage(rewards, greedy, mask_of(batch))
    same(outcome.over_greedy(scores, greedy)[:, None].expand_as(theirs)[batch.mask], theirs[batch.mask])
    assert theirs[~batch.mask].any(), "verl leaves the return on the tokens that were not sampled"


@seeds
@pytest.mark.parametrize("std", [True, False])
def test_best_of_group_matches_verl(seed, std):
    batch = rows(seed, singletons=False)
    rewards, scores = graded(batch)
    config = {"norm_adv_by_std_in_grpo": std}
    theirs, _ = verl.compute_grpo_passk_outcome_advantage(rewards, mask_of(batch), batch.index, config=config)
    same(on_tokens(outcome.best_of_group(scores, batch.groups, std=std), batch.mask), theirs)


def test_best_of_group_matches_verl_at_ties():
    tied, groups = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 0])
    mask, config = torch.ones(3, 1, dtype=torch.float64), {"norm_adv_by_std_in_grpo": False}
    theirs, _ = verl.compute_grpo_passk_outcome_advantage(tied[:, None], mask, groups.numpy(), config=config)
    assert not theirs.any()
    assert not outcome.best_of_group(tied, groups).any()
    with pytest.raises(ValueError, match="at least 2 samples"):
        verl.compute_grpo_passk_outcome_advantage(tied[:, None], mask, np.arange(3), config=config)
    assert not outcome.best_of_group(tied, torch.arange(3)).any()


@seeds
def test_decoupled_whitened_over_tokens_matches_verl(seed):
    batch = rows(seed, singletons=False, empty=False)
    components = torch.stack([batch.scores, (batch.scores.flip(0) > 0).double(), batch.scores**2], -1)
    weights = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    keys = ["a", "b", "c"]
    theirs, _ = verl.compute_gdpo_outcome_advantage(
        batch.terminal,
        mask_of(batch),
        batch.index,
        config={"gdpo_reward_keys": keys, "gdpo_reward_weights": weights.tolist()},
        non_tensor_batch={key: components[:, k].numpy() for k, key in enumerate(keys)},
        batch={"prompts": torch.zeros(len(batch.mask), 1), "attention_mask": torch.ones(len(batch.mask), 33).long()},
    )
    ours = outcome.decoupled(components, weights, batch.groups, whiten="no")
    same(whiten(on_tokens(ours, batch.mask), batch.mask), theirs, FLOAT32)


@seeds
def test_reinforce_pp_baseline_matches_verl(seed):
    batch = rows(seed, singletons=False)
    rewards, scores = graded(batch)
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask_of(batch), batch.index)
    centred = outcome.group_relative(scores, batch.groups, std=False)
    same(whiten(on_tokens(centred, batch.mask), batch.mask), theirs, MEAN)


# Tokens


@seeds
def test_whiten_matches_verl(seed):
    batch = rows(seed)
    theirs = functional.masked_whiten(batch.values, mask_of(batch), shift_mean=True)
    same(whiten(batch.values, batch.mask), torch.where(batch.mask, theirs, 0.0), MEAN)


def test_whiten_differs_for_a_single_token():
    x, mask = torch.tensor([[3.0, 5.0]]), torch.tensor([[True, False]])
    with pytest.raises(ValueError, match="division by zero"):
        functional.masked_whiten(x, mask.float())
    assert whiten(x, mask).tolist() == [[0.0, 0.0]]


@seeds
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_matches_verl(seed, gamma):
    batch = rows(seed)
    advantages, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        batch.rewards, mask_of(batch), config=SimpleNamespace(gamma=gamma)
    )
    same(returns_to_go(batch.rewards, batch.mask, gamma=gamma), returns)
    same(whiten(reinforce_pp(batch.rewards, batch.mask, gamma=gamma), batch.mask), advantages, MEAN)


@seeds
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_matches_verl(seed, gamma, lam):
    batch = rows(seed)
    white, returns = verl.compute_gae_advantage_return(batch.rewards, batch.values, mask_of(batch), gamma, lam)
    ours, our_returns = gae(batch.rewards, batch.values, batch.mask, gamma=gamma, lam=lam)
    same(whiten(ours, batch.mask)[batch.mask], white[batch.mask], MEAN)
    same(our_returns[batch.mask], returns[batch.mask])
    gaps = ~batch.mask & batch.mask.any(-1, keepdim=True)
    assert white[gaps].abs().max() > 1e-3, "verl leaves what it carried on tokens that were not sampled"
    assert not ours[gaps].any()


def test_verl_loses_rewards_on_tool_results():
    """Four sampled tokens, then a tool's result that carries the reward of 14."""
    mask = torch.tensor([[True, True, False, True, True, False]] * 2)
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 14], [0, 0, 0, 0, 1, 0]], dtype=torch.float64)
    _, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask.double(), config=SimpleNamespace(gamma=1.0)
    )
    assert returns[0].tolist() == [0, 0, 0, 0, 0, 0]
    assert returns_to_go(rewards, mask)[0].tolist() == [14, 14, 0, 14, 14, 0]
    values = torch.zeros_like(rewards)
    _, returns = verl.compute_gae_advantage_return(rewards, values, mask.double(), 1.0, 1.0)
    assert returns[0, mask[0]].tolist() == [0, 0, 0, 0]
    assert gae(rewards, values, mask, lam=1.0)[1][0, mask[0]].tolist() == [14, 14, 14, 14]
    remax, _ = verl.compute_remax_outcome_advantage(rewards, torch.zeros(2), mask.double())
    assert not remax[0].any()
    grpo, _ = verl.compute_grpo_outcome_advantage(rewards, mask.double(), np.zeros(2))
    assert grpo[0, 0] > 0, "GRPO sums before it masks"
    # once settled, verl agrees
    _, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        settle(rewards, mask), mask.double(), config=SimpleNamespace(gamma=1.0)
    )
    same(returns_to_go(rewards, mask), returns)


@seeds
@pytest.mark.parametrize("zero_tail", [True, False])
def test_optimal_baseline_matches_verl(seed, zero_tail):
    batch = rows(seed)
    squares = torch.where(batch.mask, (2 * batch.old).exp() + 0.1, 0.0)
    theirs, returns = verl.compute_multi_turn_optimal_token_baseline_advantage(
        batch.rewards, mask_of(batch), batch.index, batch.old, squares, handle_zero_tail=zero_tail, epsilon=0.0
    )
    plain = torch.where(batch.mask, returns_to_go(batch.rewards, batch.mask), 0.0)
    same(plain[batch.mask], returns[batch.mask])
    weights = path_variance(batch.old, squares, batch.mask)
    ours = optimal_baseline(plain, weights, batch.mask, batch.groups, zero_tail=zero_tail)
    # a row alone in its group among those that sampled anything: verl has its return, we have 0
    counted = batch.mask.any(-1)
    alone = torch.tensor([int(((batch.groups == g) & counted).sum()) == 1 for g in batch.groups])
    same(ours[~alone], theirs[~alone])
    same(returns[alone] * batch.mask[alone], theirs[alone])
    assert not ours[alone].any()
    assert (alone & counted).sum() >= 2


def test_optimal_baseline_differs_from_verl_by_columns():
    """Two rows with the same returns at their sampled tokens; one has a tool's result in between."""
    mask = torch.tensor([[True, True, False, True], [True, True, True, False]])
    rewards = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.float64)
    old, squares = torch.full((2, 4), -1.0, dtype=torch.float64), torch.full((2, 4), 0.3, dtype=torch.float64)
    args = rewards, mask.double(), np.zeros(2), old, squares
    by_column, _ = verl.compute_optimal_token_baseline_advantage(*args, handle_zero_tail=False)
    by_step, _ = verl.compute_multi_turn_optimal_token_baseline_advantage(*args, handle_zero_tail=False)
    weights = path_variance(old, squares, mask)
    ours = optimal_baseline(returns_to_go(rewards, mask), weights, mask, torch.zeros(2), zero_tail=False)
    same(ours, by_step, 1e-7)
    assert ours[0, 3].item() == pytest.approx(0.5)  # against the other row's third token
    assert by_column[0, 3].item() == pytest.approx(0.0, abs=1e-7)  # against nothing: the column is the row's alone
