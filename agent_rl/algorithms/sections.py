"""Sections of an algorithm's settings: the penalty, the critic, dynamic sampling and endings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agent_rl.algorithms.dynamic_sampling import DynamicSampling
from agent_rl.algorithms.objectives.kl import KLKind
from agent_rl.config import Section


class KLConfig(Section):
    """A penalty for leaving a reference policy: the weights that the run started from."""

    where: Literal["none", "loss", "reward"] = "none"
    """`loss` adds it to the loss of each token, `reward` takes it from the rewards."""
    coefficient: float = Field(1e-3, ge=0)
    """What the estimate in nats is multiplied with."""
    kind: KLKind | Literal["unbiased"] = "k3"
    """The estimator, see `objectives.kl`; `unbiased` weighs k3 by theta/mu (DeepSeek-V3.2)."""

    @model_validator(mode="after")
    def _meaningful(self) -> KLConfig:
        if self.where == "loss" and self.kind == "k1":
            raise ValueError("kl.kind=k1 has no gradient in expectation: use k2, k3, k1+, k3+ or unbiased in the loss")
        if self.where == "reward" and self.kind == "unbiased":
            raise ValueError("kl.kind=unbiased is for the loss: in the reward, use k1")
        return self


class CriticConfig(Section):
    """The predictor of returns, for advantages over its values."""

    where: Literal["none", "shared", "separate"] = "none"
    """`shared`: a value head on the policy's own trunk, which then learns from both losses. `separate`: a model of its
    own with a head, begun as a copy of the policy."""
    coefficient: float = Field(0.5, gt=0)
    """What the value loss is multiplied with: its weight beside the policy's loss in a shared trunk. A separate critic
    hardly notices, as AdamW divides it out."""
    clip_eps: float | None = Field(0.2, gt=0)
    """How far a value may move in one batch before its gradient stops, in the unit of the returns; null for any."""
    lr: float = Field(1e-3, gt=0)
    """The learning rate of the head and of a separate critic, with the schedule of the policy's."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at first in which only the critic learns; in a shared trunk that is the head."""

    @model_validator(mode="after")
    def _meaningful(self) -> CriticConfig:
        if self.where == "none" and (steps := self.warmup_steps):
            raise ValueError(f"critic.warmup_steps={steps}: without a critic nothing would learn; set critic.where")
        return self


class DynamicSamplingConfig(Section):
    """Dynamic sampling: sample more groups until the batch is full of groups that the filters keep."""

    max_rounds: int = Field(1, ge=1)
    """At most; 1 is no dynamic sampling. A batch that isn't full by then is smaller."""
    oversampling: float = Field(3.0, ge=1)
    """A round samples at most this times the groups of a batch."""

    def start(self, target: int) -> DynamicSampling:
        """Return the bookkeeping of a batch of `target` groups."""
        return DynamicSampling(target, self.max_rounds, self.oversampling)

    @property
    def most(self) -> float:
        """The groups that may be sampled for a batch, in batches."""
        return 1 + (self.max_rounds - 1) * self.oversampling


class EndingsConfig(Section):
    """What is learned from episodes that ended in another way than their task's; see `agent_rl.core.ending`.

    `train`: as from any other. `mask`: they count in their group's statistics, and are not trained on. `exclude`: they
    count nowhere, as failures do.
    """

    truncated: Literal["train", "mask", "exclude"] = "train"
    """Those that ran out of a budget."""
    parse_error: Literal["train", "mask", "exclude"] = "train"
    """Those that were cut at a reply whose tool call can't be read."""
