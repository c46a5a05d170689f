"""How far two sequences are the same."""

from __future__ import annotations

from collections.abc import Sequence


def shared_start(one: Sequence[object], other: Sequence[object]) -> int:
    """Return with how many equal items two sequences begin."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))
