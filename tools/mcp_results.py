"""Results of MCP tools, as a model gets them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from agent_rl.core.images import Image


def text_of(parts: Sequence[str | Image]) -> str:
    """Return the text of a result, each image as a line that says so."""
    return "\n".join(map(str, parts))


def parts_of(result: Any) -> list[str | Image]:
    """Return a result as a model gets it: texts and images, the JSON of one without text; what is left out is said."""
    parts = [_part_of(part) for part in result.content]
    if result.structured_content is not None and not any(part.type == "text" for part in result.content):
        parts.insert(0, json.dumps(result.structured_content, ensure_ascii=False))
    return parts


def _part_of(part: Any) -> str | Image:
    if part.type == "image":
        with contextlib.suppress(ValueError):  # of another kind: it is left out
            return Image.of(f"data:image/any;base64,{part.data}")
    if part.type == "text":
        return str(part.text)
    if part.type == "resource_link":
        return f"[resource {part.name}: {part.uri}]"
    if part.type == "resource":
        held = part.resource
        return str(held.text) if hasattr(held, "text") else f"[{held.mime_type or 'resource'} left out: {held.uri}]"
    size = len(getattr(part, "data", "")) * 3 // 4
    return f"[{part.type} left out: {getattr(part, 'mime_type', None) or 'unknown type'}, {size} bytes]"
