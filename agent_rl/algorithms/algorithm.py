"""Algorithm: advantage x objective x aggregation x correction x filter, put together from a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from agent_rl.algorithms.advantages import group_relative
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.algorithms.batch import Batch, Denominators, to_samples
from agent_rl.algorithms.corrections import CORRECTIONS
from agent_rl.algorithms.filters import informative
from agent_rl.algorithms.objectives import ppo_clip
from agent_rl.types import Episode, Sample


class AlgorithmConfig(BaseModel):
    """The knobs of `configs/algorithm/*.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "grpo"
    advantage: Literal["group-relative"] = "group-relative"
    advantage_std: bool = True
    """Divide the advantage by its group's standard deviation."""
    objective: Literal["ppo-clip"] = "ppo-clip"
    clip_low_eps: float = Field(0.2, gt=0, le=1)
    clip_high_eps: float = Field(0.28, gt=0)
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    correction: Literal["none", "token-tis"] = "none"
    correction_cap: float = Field(2.0, gt=0)
    count_zero_advantage: bool = True
    """Whether episodes of advantage 0, which are dropped since they have no gradient, still count in the denominators.
    Counted, they make steps smaller the fewer groups are left to learn from, which keeps the end of a run calm; DAPO
    does not count them, as it samples until the batch is full."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's share of the loss, with sums over its sampled tokens to report means from."""

    loss: Tensor
    sums: dict[str, float]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What both backends call: episodes → samples, log-probabilities → loss."""

    config: AlgorithmConfig

    def samples(self, episodes: Sequence[Episode]) -> tuple[list[Sample], Denominators]:
        """Compute advantages within groups; return what has a gradient, and the counts that its loss is divided by.

        Episodes that are not scored take no part in either.
        """
        rewards = [e.reward for e in episodes]
        advantages = group_relative(rewards, [e.group_id for e in episodes], std=self.config.advantage_std)

        def chosen(*, drop_zero: bool) -> list[Sample]:
            kept = informative(advantages, drop_zero=drop_zero)
            return to_samples([episodes[i] for i in kept], [advantages[i] or 0.0 for i in kept])

        # a row of advantage 0 has no gradient: it is never worth a forward pass
        rows = chosen(drop_zero=True)
        return rows, Denominators.of(chosen(drop_zero=False) if self.config.count_zero_advantage else rows)

    def loss(self, logprobs: Tensor, old_logprobs: Tensor, batch: Batch, whole: Denominators) -> LossTerms:
        """Return a micro-batch's share of the loss of the batch that `whole` counts.

        Args:
            logprobs: of every token given those before it, under theta, `[B, T]`, with gradient.
            old_logprobs: the same under the proximal policy, without gradient.
            batch: the micro-batch.
            whole: counts over the whole batch.
        """
        config, mask = self.config, batch.loss_mask
        # before any arithmetic: 0 * NaN is NaN, so what stands outside the mask would come back with the gradient
        nothing = logprobs.new_zeros(())
        logprobs, old_logprobs = torch.where(mask, logprobs, nothing), torch.where(mask, old_logprobs, nothing)
        token = ppo_clip(
            logprobs,
            old_logprobs,
            batch.advantages,
            clip_low_eps=config.clip_low_eps,
            clip_high_eps=config.clip_high_eps,
        )
        weight = CORRECTIONS[config.correction](old_logprobs, batch.rollout_logprobs, cap=config.correction_cap)
        loss = AGGREGATIONS[config.aggregation](token.loss * weight, mask, whole)
        with torch.no_grad():
            gap = (logprobs - batch.rollout_logprobs)[mask].double()
            sums = {
                "ratio": float(token.ratio[mask].double().sum()),
                "clip_fraction": float(token.clipped[mask].double().sum()),
                "rollout_gap": float(gap.abs().sum()),
                # k3 estimator of KL(mu || theta), Schulman 2020: non-negative, low variance
                "rollout_kl": float((gap.exp() - 1 - gap).sum()),
            }
        return LossTerms(loss, sums)
