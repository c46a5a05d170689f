"""Advantages as choices of a config: functions of an `Experience` that return float64 `[B, T]`, 0 outside the mask.

Those that need a critic are in `critic`, and say what it is trained towards, too.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_rl.algorithms.advantages import episode as outcome
from agent_rl.algorithms.advantages import token, turn
from agent_rl.algorithms.advantages.critic import WITH_CRITIC, AdvantageEstimate
from agent_rl.algorithms.components import Component, ComponentRegistry, Fraction
from agent_rl.algorithms.experience import Experience
from agent_rl.algorithms.objectives.preference import preference_pairs
from agent_rl.errors import ConfigError

Discount = Fraction


def group_relative(x: Experience, *, std: bool = True) -> Tensor:
    """GRPO, and Dr. GRPO without the division."""
    return x.on_tokens(outcome.group_relative(x.scores, x.groups, std=std))


def batch_normalised(x: Experience) -> Tensor:
    """ScaleRL: centred within the group, divided by the deviation over the batch."""
    return x.on_tokens(outcome.batch_normalised(x.scores, x.groups, x.kept))


def leave_one_out(x: Experience) -> Tensor:
    """RLOO."""
    return x.on_tokens(outcome.leave_one_out(x.scores, x.groups))


def length_weighted(x: Experience) -> Tensor:
    """OPO."""
    return x.on_tokens(outcome.length_weighted(x.scores, x.groups, x.lengths))


def over_greedy(x: Experience) -> Tensor:
    """ReMax: the score less that of a greedy episode of the same task."""
    return x.on_tokens(outcome.over_greedy(x.scores, x.baselines))


def best_of_group(x: Experience, *, std: bool = False) -> Tensor:
    """Only the best of a group learns, by its lead over the second."""
    return x.on_tokens(outcome.best_of_group(x.scores, x.groups, std=std))


def best_against_worst(x: Experience, *, margin: Annotated[float, Field(ge=0)] = 0.0) -> Tensor:
    """The best episode of a group and the worst, among those that are trained on; a pair for DPO."""
    able = x.kept & (x.lengths > 0)
    pairs = preference_pairs(x.scores.masked_fill(~able, math.nan), x.groups, margin=margin)
    sides = torch.zeros_like(x.scores)
    sides[pairs[:, 0]], sides[pairs[:, 1]] = 1.0, -1.0
    return x.on_tokens(sides)


def pass_at_k(x: Experience, *, k: Annotated[int, Field(ge=1)]) -> Tensor:
    """Pass@k training, for rewards of 0 and 1."""
    return x.on_tokens(outcome.pass_at_k(x.scores, x.groups, k=k))


def max_likelihood(x: Experience) -> Tensor:
    """MaxRL."""
    return x.on_tokens(outcome.max_likelihood(x.scores, x.groups))


def decoupled(x: Experience, *, whiten: Literal["episodes", "tokens", "no"] = "episodes") -> Tensor:
    """GDPO: each reward component is normalised within its group, then their weighted sum over the batch."""
    if not x.names:
        raise ConfigError(
            "advantage 'decoupled' normalises reward components; the environment's rewards have no weight"
        )
    by_episode = outcome.decoupled(x.components, x.weights, x.groups, batch_norm=whiten == "episodes")
    on_tokens = x.on_tokens(by_episode)
    return token.whiten(on_tokens, x.trained) if whiten == "tokens" else on_tokens


def returns(x: Experience, *, gamma: Discount = 1.0) -> Tensor:
    """Monte-Carlo returns, without a baseline."""
    return x.scored(token.returns_to_go(x.rows.rewards, x.rows.loss_mask, gamma=gamma))


def reinforce_pp(x: Experience, *, gamma: Discount = 1.0) -> Tensor:
    """REINFORCE++: returns, whitened over the tokens of the batch."""
    return token.whiten(returns(x, gamma=gamma), x.trained)


def reinforce_pp_baseline(x: Experience) -> Tensor:
    """REINFORCE++ with a group baseline: reward minus group mean, whitened over the tokens of the batch."""
    return token.whiten(group_relative(x, std=False), x.trained)


def optimal_baseline(x: Experience, *, gamma: Discount = 1.0, zero_tail: bool = True) -> Tensor:
    """Returns minus the baseline of least variance for each step, within the rows of a group; under old."""
    batch, mask = x.rows, x.rows.loss_mask
    unscored = x.scores.isnan()[batch.episode, None]
    returns = token.returns_to_go(batch.rewards, mask, gamma=gamma).masked_fill(unscored, torch.nan)
    weights = token.path_variance(batch.old_logprobs, batch.sum_pi_squared, mask)
    advantages = token.optimal_baseline(returns, weights, mask, x.groups[batch.episode], zero_tail=zero_tail)
    return x.scored(advantages)


def turn_returns(x: Experience, *, gamma: Discount = 1.0) -> Tensor:
    """Returns discounted once per turn, without a baseline."""
    return x.scored(turn.turn_returns(x.rows.rewards, x.rows.loss_mask, x.rows.turns, gamma=gamma))


def step_grouped(
    x: Experience, *, gamma: Discount = 0.95, omega: Annotated[float, Field(ge=0)] = 1.0, std: bool = True
) -> Tensor:
    """GiGPO: the episode's lead in its group, and the turn's lead over others that were taken in the same state."""
    rewards, present = x.by_turn()
    nameless = int((x.states[present & x.scores.isfinite()[:, None]] < 0).sum())
    if nameless:
        raise ConfigError(
            f"advantage 'step-grouped' compares turns that were taken in the same state, but {nameless} turns have "
            "none: let the environment define state_hash(self), or use another advantage"
        )
    returns = token.returns_to_go(rewards, present, gamma=gamma)
    episode, number = present.nonzero(as_tuple=True)
    steps = turn.step_grouped(x.scores, x.groups, returns[present], x.states[present], episode, omega=omega, std=std)
    return x.on_turns(torch.zeros_like(returns).index_put((episode, number), steps))


def state_values(x: Experience, *, gamma: Discount = 1.0) -> Tensor:
    """VinePPO: what a turn changed in the value of the state, which continuations measure."""
    rewards, present = x.by_turn()
    numbers = torch.arange(present.shape[1], device=present.device)
    final = torch.where(present, numbers, -1).amax(-1)
    return x.on_turns(turn.from_state_values(rewards, x.state_values, final, gamma=gamma))


ADVANTAGES: ComponentRegistry[Tensor | AdvantageEstimate] = ComponentRegistry(
    "advantage",
    {
        "group-relative": Component(
            group_relative, "A = (R - mean_group) [/ (std_group + 1e-6) if std]", "GRPO, Shao et al. 2024, eq. 3"
        ),
        "batch-normalised": Component(
            batch_normalised, "A = (R - mean_group) / (std_batch of these + 1e-6)", "ScaleRL, Khatri et al. 2025, §4"
        ),
        "leave-one-out": Component(leave_one_out, "A = R - mean of the others", "RLOO, Ahmadian et al. 2024, eq. 8"),
        "length-weighted": Component(
            length_weighted, "A = R - sum_group(|y| R) / sum_group |y|", "OPO, Hao et al. 2025, eq. 9"
        ),
        "over-greedy": Component(over_greedy, "A = R - R of the greedy episode", "ReMax, Li et al. 2023, 2310.10505"),
        "best-of-group": Component(best_of_group, "A = R_best - R_second for the best, else 0", "verl grpo_passk"),
        "best-against-worst": Component(
            best_against_worst, "A = 1 for the best, -1 for the worst where they are more than margin apart, else 0", ""
        ),
        "pass-at-k": Component(pass_at_k, "A of the pass@k reward over all k-subsets", "Chen et al. 2025, 2508.10751"),
        "max-likelihood": Component(max_likelihood, "A = (R - mean_group) / mean_group", "MaxRL, Tajwar et al. 2026"),
        "decoupled": Component(
            decoupled, "A = whiten(sum_k w_k (r_k - mean_group) / (std_group + 1e-6))", "GDPO, 2601.05242"
        ),
        "returns": Component(
            returns, "A_t = sum_{s>=t} gamma^(s-t) r_s over sampled tokens", "REINFORCE, Williams 1992"
        ),
        "reinforce-pp": Component(reinforce_pp, "A = whiten(returns)", "REINFORCE++, Hu et al. 2025"),
        "reinforce-pp-baseline": Component(
            reinforce_pp_baseline, "A = whiten(R - mean_group)", "REINFORCE++-baseline, Hu et al. 2025"
        ),
        "optimal-baseline": Component(
            optimal_baseline,
            "A_t = G_t - sum_group(W_t G_t) / sum_group W_t, W_t = sum_{j<=t} 1 - 2 pi_j + sum_v pi_j(v)^2 under old",
            "Optimal token baseline, Li et al. 2026, 2602.07078",
        ),
        "turn-returns": Component(turn_returns, "A_t = sum_{k>=turn(t)} gamma^(k-turn(t)) r_k", "ROLL, segment-wise"),
        "step-grouped": Component(
            step_grouped,
            "A_k = norm_group(R) + omega * norm_state(G_k), G_k = r_k + gamma G_{k+1}, norm(x) = x - mean [/ std]",
            "GiGPO, Feng et al. 2025, 2505.10978, eq. 8",
        ),
        "state-values": Component(
            state_values,
            "A_k = r_k + gamma V_{k+1} - V_k, V_k = mean return of continuations from before turn k",
            "VinePPO, Kazemnejad et al. 2024, 2410.01679",
        ),
        **WITH_CRITIC,
    },
)
