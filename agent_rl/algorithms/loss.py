"""The loss of a micro-batch: an objective's, with what masks and weighs its tokens, and what is added to it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from agent_rl.algorithms.batch import Denominators, LossInputs
from agent_rl.algorithms.components import Part, computed
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.corrections import clamped_exp
from agent_rl.algorithms.objectives.base import Sequences, TokenLoss
from agent_rl.algorithms.objectives.kl import kl_estimate, unbiased_kl
from agent_rl.algorithms.on_tokens import described, shaped
from agent_rl.errors import DefinitionError


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's share of the loss, with sums over its sampled tokens to report means from, and `EXTREMES`."""

    loss: Tensor
    sums: dict[str, float]


EXTREMES = {"ratio_max": max, "ratio_min": min}
"""What two micro-batches' are one by, instead of their sum; both extremes are of the ratios and 1."""


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """An algorithm's loss, by the parts that make it."""

    config: AlgorithmConfig
    objective: Part[TokenLoss | Tensor]
    negative_mask: Part[Tensor] | None
    aggregation: Part[Tensor]

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: LossInputs, whole: Denominators) -> LossTerms:
        """Return a micro-batch's share of the loss of the batch that `whole` counts.

        Log-probabilities of every token given those before it, under theta, and the entropies of the distributions they
        come from are `[B, T]`, with gradient (of the latter only if `config.entropy` is not 0). The micro-batch is of a
        prepared batch, where the objective `needs_scores_before_update`.

        Raises:
            ConfigError: if a part reads what was not computed, such as the reference's log-probabilities.
        """
        config, mask = self.config, batch.loss_mask
        known = _masked(batch, logprobs)
        if "sequences" in self.objective.reads:
            parts = batch.sequences
            known.sequences = Sequences.of(mask) if parts is None else Sequences(*parts[..., None].unbind(1))
        logprobs, mu, nothing = known.logprobs, known.rollout_logprobs, logprobs.new_zeros(())
        found = self.objective(known)
        token = found if isinstance(found, TokenLoss) else _token_loss(self.objective, found, known)
        per_token, counted, learns, sums = token.loss * batch.weights, batch.counted, mask, dict[str, float]()
        if self.negative_mask is not None:
            left_out = self.negative_mask(known) if batch.sequences is None else batch.sequences[:, -1] > 0
            gone = shaped(self.negative_mask, left_out, mask.shape[:1])
            per_token, learns = torch.where(gone[:, None], nothing, per_token), mask & ~gone[:, None]
            sums["masked_fraction"] = float(mask[gone].sum())
        if config.kl.where != "none":
            reference = computed(known.reference_logprobs, "reference_logprobs", f"kl.where={config.kl.where}")
            # k1: unbiased, can be negative
            sums["reference_kl"] = float((logprobs - reference)[mask].detach().double().sum())
        if config.kl.where == "loss":
            if config.kl.kind == "unbiased":
                kl = unbiased_kl(logprobs, mu, reference)
            else:
                kl = kl_estimate(logprobs, reference, kind=config.kl.kind)
            per_token = per_token + config.kl.coefficient * kl
        if config.entropy:
            per_token = per_token - config.entropy * torch.where(mask, entropy, nothing)
        if token.is_whole and batch.sequences is not None:  # 0, with the gradient of what its other rows weigh
            by_others = known.sequences.others * (token.loss - token.loss.detach())
            per_token = torch.where(counted, per_token, nothing) + torch.where(learns, by_others, nothing)
            counted = mask
        read = SimpleNamespace(loss=per_token, mask=counted, whole=whole)
        loss = self.aggregation(read, batch)
        if loss.dim():
            raise DefinitionError(f"aggregation '{self.aggregation.name}' returned {described(loss)}: return a scalar")
        with torch.no_grad():
            gap = (logprobs - mu)[mask].double()
            moved = (logprobs - known.old_logprobs)[mask].double()
            ratio = token.ratio.masked_fill(~mask, 1.0)
            sums |= {
                "ratio": float(token.ratio[mask].double().sum()),
                "ratio_max": float(ratio.max()),
                "ratio_min": float(ratio.min()),
                "clip_fraction": float(token.clipped[mask].double().sum()),
                "weight": float(batch.weights[mask].double().sum()),
                "entropy": float(entropy[mask].double().sum()),
                "rollout_gap": float(gap.abs().sum()),
                # k3 estimators of KL(mu || theta) and KL(old || theta), Schulman 2020: non-negative, low variance
                "rollout_kl": float((gap.exp() - 1 - gap).sum()),
                "old_kl": float((moved.exp() - 1 - moved).sum()),
            }
        return LossTerms(loss, sums)


def _masked(batch: LossInputs, logprobs: Tensor) -> SimpleNamespace:
    """The inputs of objectives, 0 at tokens that were not sampled.

    Before any arithmetic: 0 * NaN is NaN, so what is outside the mask would come back with the gradient.
    """
    mask, nothing, reference = batch.loss_mask, logprobs.new_zeros(()), batch.reference_logprobs
    return SimpleNamespace(
        mask=mask,
        logprobs=torch.where(mask, logprobs, nothing),
        old_logprobs=torch.where(mask, batch.old_logprobs, nothing),
        rollout_logprobs=torch.where(mask, batch.rollout_logprobs, nothing),
        reference_logprobs=None if reference is None else torch.where(mask, reference, nothing),
        advantages=batch.advantages,
        weights=batch.weights,
    )


def _token_loss(part: Part[TokenLoss | Tensor], found: Tensor, known: SimpleNamespace) -> TokenLoss:
    """Complete an objective's plain loss of tokens `[B, T]` with the ratio theta/old to report."""
    loss = shaped(cast(Part[Tensor], part), found, known.mask.shape)
    ratio = clamped_exp((known.logprobs - known.old_logprobs).detach())
    return TokenLoss(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))
