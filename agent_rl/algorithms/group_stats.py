"""Statistics within groups: numbers of episodes are compared with those of other samples of the same task.

Every function takes `values`, float64 `[E]`, and `index`, int64 `[E]`, the group of each episode counted from 0 (see
`group_index`), and returns `[E]`: the group's statistic at each of its episodes. NaN takes no part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError
from agent_rl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def group_index(groups: Tensor, values: Tensor) -> Tensor:
    """Number the groups from 0, int64 `[E]`; `groups` are any ids of the values' episodes.

    Raises:
        ConfigError: if the shapes differ.
    """
    if groups.shape != values.shape:
        check_length("groups", groups, values)
    index: Tensor = torch.unique(groups, return_inverse=True)[1]
    return index


def check_length(name: str, other: Tensor, scores: Tensor) -> None:
    """Raise ConfigError unless there is one number per episode."""
    if other.shape != scores.shape:
        raise ConfigError(
            f"scores of shape {tuple(scores.shape)} came with {name} of shape {tuple(other.shape)}; "
            f"there must be one of each per episode"
        )


def group_sum(values: Tensor, index: Tensor) -> Tensor:
    """Return the sum."""
    return torch.zeros_like(values).scatter_add(0, index, torch.where(values.isnan(), 0.0, values))[index]


def group_count(values: Tensor, index: Tensor) -> Tensor:
    """Return how many values are known."""
    return group_sum((~values.isnan()).double(), index)


def group_range(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value; inf and -inf where none is known."""
    known, nothing = ~values.isnan(), torch.full_like(values, torch.inf)
    low = nothing.scatter_reduce(0, index, torch.where(known, values, torch.inf), "amin")
    high = (-nothing).scatter_reduce(0, index, torch.where(known, values, -torch.inf), "amax")
    return low[index], high[index]


def group_mean(values: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean, weighted if there are weights `[E]`; the mean of equal values is exactly that value."""
    weights = torch.ones_like(values) if weights is None else weights
    weights = torch.where(values.isnan(), 0.0, weights)
    mean = group_sum(weights * values, index) / group_sum(weights, index)
    low, high = group_range(values, index)
    return torch.minimum(torch.maximum(mean, low), high)  # rounding must not carry it past them


def group_deviation(centred: Tensor, index: Tensor, eps: float) -> Tensor:
    """Return the Bessel-corrected standard deviation about 0, plus `eps`; 1 where it is 0, so that `eps` may be 0."""
    std = (group_sum(centred**2, index) / (group_count(centred, index) - 1).clamp(min=1)).sqrt()
    return torch.where(std > 0, std + eps, torch.ones_like(std))
