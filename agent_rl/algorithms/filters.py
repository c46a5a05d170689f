"""Filters: which episodes are worth a gradient."""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE = 1e-6
"""Advantages below this are rounding noise of equal rewards; `!= 0` would keep them."""


def informative(advantages: Sequence[float | None], *, drop_zero: bool = True) -> list[int]:
    """Return the indices of the episodes to train on.

    Args:
        advantages: one per episode; None was not scored and is never trained on.
        drop_zero: leave out advantages of 0, whose gradient is 0; this changes the denominators of the loss.
    """
    return [i for i, a in enumerate(advantages) if a is not None and not (drop_zero and abs(a) < TOLERANCE)]
