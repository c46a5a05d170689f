"""Messages and tools as the dictionaries that chat templates and servers expect (OpenAI's format)."""

from __future__ import annotations

from collections.abc import Sequence

from agent_rl.core.messages import JSON, Message
from agent_rl.gym.tool import ToolSpec


def as_unicode(text: str) -> str:
    """Return the text with a "?" for each half of a surrogate pair (file names that are no UTF-8 have them)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def message_dict(message: Message) -> dict[str, JSON]:
    """Return the message with the keys it needs; a tool call's arguments stay an object, never a string."""
    out: dict[str, JSON] = {"role": message.role, "content": as_unicode(message.content)}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def tool_dicts(tools: Sequence[ToolSpec]) -> list[dict[str, JSON]] | None:
    """Return the tools' schemas, or None where there are none: templates tell an empty list from None."""
    return [dict(tool.openai()) for tool in tools] or None
