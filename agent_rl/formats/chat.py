"""OpenAI's chat messages: what most tools for text read and write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from agent_rl.core.images import Image
from agent_rl.core.messages import JSON, ROLES, Message, Role, ToolCall, ToolErrorKind, without_nan
from agent_rl.rendering.chat_format import as_unicode, chat_parts

_ROLES = {"developer": "system", "function": "tool"}
"""What OpenAI calls them as well."""
_IMAGES = ("data:image/png;", "data:image/jpeg;", "data:image/jpg;")
"""How the URLs begin that hold an image; one elsewhere is not loaded."""


def chat_messages(messages: Sequence[Message], *, as_objects: bool = False) -> list[dict[str, JSON]]:
    """Return messages in OpenAI's format; images are data URLs, a tool's error is beside its message.

    Args:
        messages: the messages.
        as_objects: whether the arguments of calls are objects, as chat templates take them; OpenAI's are texts.
    """
    return [_chat_message(message, as_objects) for message in messages]


def _chat_message(message: Message, as_objects: bool) -> dict[str, JSON]:
    optional: dict[str, JSON] = {
        "reasoning_content": message.reasoning and as_unicode(message.reasoning),
        "tool_calls": [_chat_call(call, as_objects) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name and as_unicode(message.name),
        "tool_error": message.tool_error and message.tool_error.value,
    }
    content: JSON = chat_parts(message.parts) if message.parts else as_unicode(message.content)
    said: dict[str, JSON] = {"role": message.role, "content": content}
    return said | {name: value for name, value in optional.items() if value}


def _chat_call(call: ToolCall, as_objects: bool) -> dict[str, JSON]:
    arguments: JSON = without_nan(call.arguments)
    if not as_objects:
        arguments = as_unicode(json.dumps(arguments, ensure_ascii=False))
    named: dict[str, JSON] = {"name": as_unicode(call.name), "arguments": arguments}
    made: dict[str, JSON] = {"id": call.id, "type": "function", "function": named}
    return made | ({"error": call.error} if call.error else {})


def read_chat(messages: JSON) -> tuple[Message, ...]:
    """Return messages of OpenAI's format.

    Raises:
        ValueError: if they are none; the message says which, and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages={messages!r:.80}: give a list of messages")
    found = []
    for at, each in enumerate(messages):
        if not isinstance(each, Mapping):
            raise ValueError(f"messages[{at}]={each!r:.80}: give an object with role and content")
        try:
            found.append(_read_message(each))
        except ValueError as error:
            raise ValueError(f"messages[{at}].{error}") from error
    return tuple(found)


def _read_message(row: Mapping[str, JSON]) -> Message:
    role = _ROLES.get(str(row.get("role")), row.get("role"))
    if role not in ROLES:
        raise ValueError(f"role={role!r:.80}: the roles are {', '.join(ROLES)}")
    calls = row.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"tool_calls={calls!r:.80}: give a list")
    error = row.get("tool_error")
    if error is not None and error not in tuple(ToolErrorKind):
        raise ValueError(f"tool_error={error!r:.80}: the kinds are {', '.join(ToolErrorKind)}")
    content = row.get("content")
    parts = _parts_of(content) if role in ("user", "tool") else ()
    return Message(
        cast(Role, role),
        "" if parts else text_of(content),
        reasoning=_text(row.get("reasoning_content") or row.get("reasoning")),
        tool_calls=tuple(_read_call(call, f"call_{at}") for at, call in enumerate(calls)),
        tool_call_id=_text(row.get("tool_call_id")),
        name=_text(row.get("name")),
        tool_error=None if error is None else ToolErrorKind(str(error)),
        parts=parts,
    )


def _read_call(call: JSON, id: str) -> ToolCall:
    named = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(named, Mapping) or not (named.get("name") or call.get("error")):
        raise ValueError(f"tool_calls: {call!r:.80} names no function")  # one that could not be read has an error
    error, given = _text(call.get("error")), named.get("arguments") or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as problem:
            error, given = error or f"the arguments are not JSON: {problem}", {}
    if not isinstance(given, Mapping):
        error, given = error or f"the arguments are no object: {given!r:.80}", {}
    return ToolCall(str(call.get("id") or id), str(named.get("name") or ""), given, error)


def _parts_of(content: JSON) -> tuple[str | Image, ...]:
    """Return the parts of a content with PNG or JPEG images in it; none of another, which is text."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return ()
    parts = [_image_of(part) or text_of([part]) for part in content]
    return tuple(parts) if any(isinstance(part, Image) for part in parts) else ()


def _image_of(part: JSON) -> Image | None:
    held = part.get("image_url") if isinstance(part, Mapping) else None
    url = held.get("url") if isinstance(held, Mapping) else held
    return Image.of(url) if isinstance(url, str) and url.startswith(_IMAGES) else None


def text_of(content: JSON) -> str:
    """Return a content, a text or a list of parts, as text; parts that are no text are named.

    Raises:
        ValueError: if it is neither.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        parts = cast("Sequence[Mapping[str, JSON]]", content)
        return "".join(
            f"[{part.get('type', 'part')}]" if part.get("text") is None else str(part["text"]) for part in parts
        )
    raise ValueError(f"content={content!r:.80}: give a text, or a list of parts")


def _text(value: JSON) -> str | None:
    return None if value is None else str(value)
