"""A user's own advantage, objective, shaping and filter."""

from torch import Tensor

import agent_rl as ar


@ar.advantage("test-centred", formula="A = scale (R - mean of the batch)")
def centred(scores: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * (scores - scores.nanmean())


@ar.objective("test-plain", formula="L = -A log theta", source="mine")
def plain(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * logprobs


@ar.shaping("test-bonus", formula="R += bonus")
def bonus(scores: Tensor, *, bonus: float) -> Tensor:
    return scores + bonus


@ar.filter("test-short", formula="episodes of at most `most` tokens")
def short(lengths: Tensor, *, most: int) -> Tensor:
    return lengths <= most
