"""A set of minutes, kept as disjoint spans in order."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Spans:
    """Half-open spans [start, end); spans that touch are joined."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in spans:
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def __contains__(self, minute: int) -> bool:
        at = bisect_right(self._starts, minute) - 1
        return at >= 0 and minute < self._ends[at]

    def add(self, start: int, end: int) -> None:
        """Add a span."""
        if start >= end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Remove a span, or what there is of it."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if start >= end or first >= last:
            return
        begin, finish = self._starts[first], self._ends[last - 1]
        left = [(a, b) for a, b in ((begin, start), (end, finish)) if a < b]
        self._starts[first:last] = [a for a, _ in left]
        self._ends[first:last] = [b for _, b in left]

    def free(self, start: int, end: int) -> "Spans":
        """Return what a span has besides these."""
        left = Spans([(start, end)])
        for each in self:
            left.remove(*each)
        return left
