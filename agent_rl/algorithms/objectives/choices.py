"""Objectives as choices of a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from agent_rl.algorithms.components import Component, ComponentConfig, ComponentRegistry
from agent_rl.algorithms.objectives import pairwise as whole
from agent_rl.algorithms.objectives import sequence
from agent_rl.algorithms.objectives import token as clipped
from agent_rl.algorithms.objectives.base import TokenLoss
from agent_rl.algorithms.objectives.pairwise import BatchObjective, PreparedBatch

TokenLossFunction: TypeAlias = Callable[..., TokenLoss]
Preparation: TypeAlias = Callable[..., PreparedBatch]

OBJECTIVES: ComponentRegistry[TokenLoss | PreparedBatch] = ComponentRegistry(
    "objective",
    {
        "reinforce": Component(clipped.reinforce, "L = -A log theta", "Williams 1992"),
        "ppo-clip": Component(
            clipped.ppo_clip,
            "L = max(-A r, -A clip(r, 1 - clip_low_eps, 1 + clip_high_eps)), r = theta/old",
            "PPO, Schulman et al. 2017, eq. 7; clip-higher: DAPO, Yu et al. 2025",
        ),
        "cispo": Component(
            clipped.cispo, "L = -sg(clip(r)) A log theta, r = theta/old", "CISPO, MiniMax-M1 2025, eq. 4"
        ),
        "sapo": Component(clipped.sapo, "L = -(4/tau) sigmoid(tau (r - 1)) A, r = theta/old", "SAPO, Gao et al. 2025"),
        "dppo-tv": Component(
            clipped.dppo_tv, "L = -sg(r) A log theta where |theta - mu| stays in bounds, r = theta/mu", "DPPO, 2026"
        ),
        "dppo-kl": Component(
            clipped.dppo_kl, "L = -sg(r) A log theta where KL(mu, theta) of the token stays in bounds", "DPPO, 2026"
        ),
        "minirl": Component(
            clipped.minirl, "L = -M sg(min(theta/mu, cap)) A log theta, M by r = theta/old", "MiniRL, 2512.01374"
        ),
        "m2po": BatchObjective(
            whole.m2po,
            "L = -M A r, r = theta/mu, M keeps mean log(r)^2 <= second_moment",
            "M2PO, 2510.01161",
            clipped.m2po,
        ),
        "dpo": BatchObjective(
            whole.dpo,
            "L = -log sigmoid(beta (log theta/reference of the better - of the worse)), mean over pairs",
            "DPO, Rafailov et al. 2023, eq. 7",
            clipped.reinforce,
        ),
        "gspo": Component(
            sequence.gspo, "L = PPO-clip of s = exp(mean_t log(theta/old))", "GSPO, Zheng et al. 2025, eq. 5"
        ),
        "gspo-token": Component(
            sequence.gspo_token, "L = PPO-clip of sg(s) theta/sg(theta)", "GSPO-token, Zheng et al. 2025, eq. 13"
        ),
        "gmpo": Component(
            sequence.gmpo, "L = -A exp(mean_t clipped log(theta/old))", "GMPO, Zhao et al. 2025, 2507.20673"
        ),
        "luspo": Component(sequence.luspo, "L = |y| times GSPO's", "LUSPO, as in TRL"),
    },
)


def token_loss(chosen: ComponentConfig) -> TokenLossFunction:
    """Return the loss of each token; of a prepared batch, if there is a `preparation`."""
    choice = OBJECTIVES[chosen]
    return choice.token_loss if isinstance(choice, BatchObjective) else cast(TokenLossFunction, OBJECTIVES.bind(chosen))


def preparation(chosen: ComponentConfig) -> Preparation | None:
    """Return what an objective wants to do before each update, `(theta, batch) -> Prepared`; None for nothing."""
    whole_batch = isinstance(OBJECTIVES[chosen], BatchObjective)
    return cast(Preparation, OBJECTIVES.bind(chosen)) if whole_batch else None


NEGATIVE_MASKS = ComponentRegistry(
    "negative mask",
    {
        "none": Component(sequence.no_sequences, "every row has its loss", "no mask"),
        "opsm": Component(
            sequence.off_policy_sequences,
            "L = 0 for rows with A < 0 and mean_t log(mu/theta) > delta",
            "off-policy sequence masking, DeepSeek-V3.2 2025",
        ),
    },
)
"""Which rows have no loss from the objective, bool `[B]`; they still count in the denominators."""
