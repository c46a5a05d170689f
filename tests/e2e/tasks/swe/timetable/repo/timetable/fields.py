"""The fields of an entry: *, */15, 1-5, 1,2,3 and what these make together."""


def field(text: str, low: int, high: int) -> frozenset[int]:
    """Return the numbers that a field names.

    Raises:
        ValueError: if it names others than those from low to high.
    """
    found = set[int]()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = (f"{low}-{high}" if span == "*" else span).partition("-")
        found.update(range(int(first), int(last or first) + 1, int(step or 1)))
    if not found or min(found) < low or max(found) > high:
        raise ValueError(f"{text}: give numbers from {low} to {high}")
    return frozenset(found)
