"""Sets of half-open spans of minutes."""

from spans.spans import Spans
from spans.text import text_of

__all__ = ["Spans", "text_of"]
