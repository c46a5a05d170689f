"""An advantage and an objective of your own, in place of GRPO's.

    agent-rl train --import examples/own_objective.py algorithm.advantage=over-median algorithm.objective=soft-clip

A function's positional parameters name the arrays that it reads; what needs computing for them is computed. Its
keyword-only parameters are its settings: `algorithm.objective={name: soft-clip, width: 0.1}`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import agent_rl as ar
from agent_rl.algorithms.components import Positive


@ar.advantage("over-median", formula="A = score - median of the group")
def over_median(scores: Tensor, groups: Tensor) -> Tensor:
    """Compare each episode with the median of its group, which one lucky episode does not move.

    Args:
        scores: of the episodes, float64 `[E]`; NaN where there is none.
        groups: the number of each episode's group, int `[E]`.
    """
    advantages = torch.zeros_like(scores)
    for group in set(groups.tolist()):
        own = groups == group
        advantages[own] = scores[own] - scores[own].nanmedian()
    return advantages.nan_to_num()


@ar.objective("soft-clip", formula="L = -A width tanh((theta/old - 1) / width)")
def soft_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, width: Positive = 0.2) -> Tensor:
    """Hold the policy near the old one by a smooth bound; PPO's has a corner.

    Args:
        logprobs: of the tokens under the policy in training, `[B, T]`, with gradient.
        old_logprobs: under the policy before the update, `[B, T]`.
        advantages: `[B, T]`.
        width: how far the ratio may move from 1 to be rewarded for it.
    """
    moved = (logprobs - old_logprobs).exp() - 1
    return -advantages.to(logprobs.dtype) * width * torch.tanh(moved / width)
