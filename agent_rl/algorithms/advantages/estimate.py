"""Results of an advantage other than a plain tensor of episodes `[E]` or tokens `[B, T]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """Advantages of turns; all tokens that the policy sampled in a turn have the turn's."""

    advantages: Tensor
    """float64 `[E, K]`; NaN becomes 0."""


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """Advantages over a critic's values, and the critic's targets."""

    advantages: Tensor
    """float64 `[B, T]`."""
    returns: Tensor
    """float64 `[B, T]`: the advantages before whitening plus the values, where `valued`; 0 elsewhere."""
    valued: Tensor
    """bool `[B, T]`: where the critic was asked, and is to be trained."""
