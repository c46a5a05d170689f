"""A trained model beside transformers: what a run stored of its tokens, and what a plain forward says of them."""

from __future__ import annotations

import numpy as np
import torch

from agent_rl.core.episode import Episode


def largest_difference(model: torch.nn.Module, found: list[Episode]) -> float:
    """Return it between stored log-probabilities and those of a plain forward of the model over the stored ids."""
    worst = 0.0
    for trajectory in (t for e in found for t in e.trajectories):
        ids, mask = torch.tensor(trajectory.token_ids.tolist()), torch.tensor(trajectory.loss_mask.tolist())
        with torch.no_grad():
            plain = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        stored = torch.tensor(np.asarray(trajectory.logprobs))[1:]
        assert torch.equal(stored.isnan(), ~mask[1:]) and mask.any()
        worst = max(worst, float((plain - stored)[mask[1:]].abs().max()))
    return worst
