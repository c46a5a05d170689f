"""Batch: samples padded to tensors, and the counts that make a loss independent of how the batch is cut up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agent_rl.types import Episode, Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples padded on the right to a common length `T`. Position `t` of every array describes token `t`."""

    token_ids: Tensor
    """int64 `[B, T]`."""
    loss_mask: Tensor
    """bool `[B, T]`: True where the policy sampled the token."""
    rollout_logprobs: Tensor
    """float32 `[B, T]`, in nats, under the distribution that was sampled from; 0 outside the mask."""
    advantages: Tensor
    """float32 `[B, T]`; 0 outside the mask."""
    lengths: Tensor
    """int64 `[B]`."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the *whole* batch, so that the losses of its micro-batches add up to the loss of the batch."""

    tokens: int
    """Sampled tokens."""
    sequences: int
    """Samples with at least one sampled token."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Denominators:
        """Count a batch; at least 1 each, so that an empty batch has loss 0."""
        counts = [int(s.loss_mask.sum()) for s in samples]
        return cls(max(1, sum(counts)), max(1, sum(c > 0 for c in counts)))


def to_samples(episodes: Sequence[Episode], advantages: Sequence[float]) -> list[Sample]:
    """Turn episodes into samples, one per trajectory, with the episode's advantage on every sampled token.

    Args:
        episodes: finished episodes with token ids.
        advantages: one number per episode.
    """
    samples = []
    for episode, advantage in zip(episodes, advantages, strict=True):
        for trajectory in episode.trajectories:
            mask = trajectory.loss_mask
            if not mask.any():
                continue
            samples.append(
                Sample(
                    token_ids=trajectory.token_ids,
                    loss_mask=mask,
                    rollout_logprobs=np.where(mask, trajectory.logprobs, np.float32(0)),
                    advantages=np.where(mask, np.float32(advantage), np.float32(0)),
                    policy_versions=trajectory.policy_versions,
                    turns=trajectory.turns,
                    episode_id=episode.id,
                    group_id=episode.group_id,
                    routed_experts=trajectory.routed_experts,
                )
            )
    return samples


def collate(samples: Sequence[Sample], pad_id: int = 0, device: torch.device | None = None) -> Batch:
    """Pad samples to tensors."""
    width = max(len(s.token_ids) for s in samples)

    def padded(arrays: Sequence[np.ndarray], fill: int, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(arrays), width), fill, dtype=dtype)
        for row, array in zip(out, arrays, strict=True):
            row[: len(array)] = torch.from_numpy(array)
        return out.to(device)

    return Batch(
        token_ids=padded([s.token_ids for s in samples], pad_id, torch.int64),
        loss_mask=padded([s.loss_mask for s in samples], 0, torch.bool),
        rollout_logprobs=padded([s.rollout_logprobs for s in samples], 0, torch.float32),
        advantages=padded([s.advantages for s in samples], 0, torch.float32),
        lengths=torch.tensor([len(s.token_ids) for s in samples], device=device),
    )


def micro_batches(samples: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """Cut samples into micro-batches of at most `token_budget` padded tokens, similar lengths together.

    A sample longer than the budget gets a micro-batch of its own: nothing is dropped or cut.
    """
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: -len(s.token_ids)):
        width = len(batches[-1][0].token_ids) if batches else 0
        if batches and (len(batches[-1]) + 1) * width <= token_budget:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches
