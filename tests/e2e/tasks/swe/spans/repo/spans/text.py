"""Spans as people write them."""

from spans.spans import Spans


def text_of(spans: Spans) -> str:
    """Return spans as hours and minutes: 08:00-09:30, 10:00-11:00."""
    return ", ".join(f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}" for a, b in spans)
