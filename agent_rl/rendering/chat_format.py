"""Messages and tools as the dictionaries that chat templates and servers expect (OpenAI's format)."""

from __future__ import annotations

from collections.abc import Sequence

from agent_rl.core.images import Image
from agent_rl.core.messages import JSON, Message, images_in
from agent_rl.errors import RenderError
from agent_rl.gym.tool import ToolSpec


def as_unicode(text: str) -> str:
    """Return the text with a "?" for each half of a surrogate pair (file names that are no UTF-8 have them)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def require_text(messages: Sequence[Message], env: str = "") -> None:
    """Refuse images, for what makes token ids of messages.

    Args:
        messages: of the environment.
        env: its id, where that is known here.

    Raises:
        RenderError: if a message holds one; it says what plays such an environment.
    """
    for image in images_in(messages):
        raise RenderError(
            f"{env and f'{env}: '}{image} in a message, but policies on token ids read text only. Play with "
            "policy=openai and a model that sees images, or let the environment say in words what they show"
        )


def message_dict(message: Message) -> dict[str, JSON]:
    """Return the message with the keys it needs; a tool call's arguments stay an object, never a string.

    An image is a line of the content: `require_text` first, where that is not enough.
    """
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


def chat_parts(parts: Sequence[str | Image]) -> list[JSON]:
    """Return the parts of a message as OpenAI's content parts: an image as a data URL."""
    return [
        {"type": "image_url", "image_url": {"url": part.url}}
        if isinstance(part, Image)
        else {"type": "text", "text": as_unicode(part)}
        for part in parts
    ]


def tool_dicts(tools: Sequence[ToolSpec]) -> list[dict[str, JSON]] | None:
    """Return the tools' schemas, or None where there are none: templates tell an empty list from None."""
    return [dict(tool.openai()) for tool in tools] or None
