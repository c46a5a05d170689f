"""OpenAI's chat format: messages and tools as a request, and what an answer says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from agent_rl.core.messages import JSON, Message, ToolCall, images_in
from agent_rl.rendering.chat_format import chat_parts, message_dict
from agent_rl.rendering.hermes import read_json

_FOREIGN = re.compile("[^A-Za-z0-9_-]")
"""What OpenAI's API refuses in a function's name."""


class _Part(BaseModel):
    model_config = ConfigDict(defer_build=True)  # most runs read none


class _Function(_Part):
    name: str | None = None
    arguments: JsonValue = None


class _Call(_Part):
    id: str | None = None
    function: _Function = _Function()


class _Message(_Part):
    content: JsonValue = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str:
        """The content, a string or a list of parts, as text."""
        if isinstance(self.content, Sequence) and not isinstance(self.content, str):
            parts = [cast(Mapping[str, JSON], part) for part in self.content if isinstance(part, Mapping)]
            return "".join(str(part.get("text") or "") for part in parts)
        return self.content if isinstance(self.content, str) else ""


class _Choice(_Part):
    message: _Message
    finish_reason: str | None = None


class _Details(_Part):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class TokenCounts(_Part):
    """The token counts of an answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were read from a cache."""
        return (self.prompt_tokens_details or _Details()).cached_tokens or 0

    @property
    def reasoning(self) -> int:
        """Tokens of the completion that are no part of the answer."""
        return (self.completion_tokens_details or _Details()).reasoning_tokens or 0


class ChatAnswer(_Part):
    """The body of an answer; fields that servers add are ignored."""

    choices: list[_Choice] | None = None
    usage: TokenCounts | None = None
    error: JsonValue = None
    """Some servers answer with status 200 and an error."""


class ModelList(_Part):
    """What a server lists under /models."""

    class Model(_Part):
        """One model."""

        id: str

    data: list[Model] = Field(min_length=1)


def request_messages(messages: Sequence[Message], *, reasoning: bool) -> list[dict[str, JSON]]:
    """Return messages as a request has them, with their images.

    A user message is a list of parts then. A tool message can only be text on most servers: its images are lines there,
    and follow in a user message behind the results of the turn, each under its line.
    """
    out: list[dict[str, JSON]] = []
    shown: list[JSON] = []
    for message in messages:
        if shown and message.role != "tool":
            out.append({"role": "user", "content": shown})
            shown = []
        said = request_message(message, reasoning=reasoning)
        if message.role == "tool":
            shown += [part for image in images_in([message]) for part in chat_parts([str(image), image])]
        elif message.parts:
            said["content"] = chat_parts(message.parts)
        out.append(said)
    return [*out, {"role": "user", "content": shown}] if shown else out


def request_message(message: Message, *, reasoning: bool) -> dict[str, JSON]:
    """Return a message as a request has it, an image as a line of text.

    A call that could not be parsed has no arguments: many servers refuse a request with broken JSON.
    """
    out = message_dict(message)
    if not reasoning:
        out.pop("reasoning_content", None)
    if message.tool_calls:
        out["content"] = message.content or None
        out["tool_calls"] = [_request_call(call) for call in message.tool_calls]
    return out


def _request_call(call: ToolCall) -> dict[str, JSON]:
    name = _FOREIGN.sub("_", call.name)[:64] or "unknown"
    arguments = json.dumps({} if call.error else dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_message(said: _Message, turn: int) -> Message:
    """Return what an answer says; a call with broken arguments has `error` set."""
    calls, known = [], set[str]()
    for index, call in enumerate(said.tool_calls or ()):
        id = call.id if call.id and call.id not in known else f"call_{turn}_{index}"
        known.add(id)
        calls.append(_read_call(id, call.function))
    reasoning = said.reasoning_content or said.reasoning
    return Message("assistant", said.text or said.refusal or "", reasoning or None, tuple(calls))


def _read_call(id: str, function: _Function) -> ToolCall:
    name, given = function.name or "", function.arguments
    try:
        if not name:
            raise ValueError("the call names no function")
        arguments = read_json(given or "{}") if isinstance(given, str | None) else given
        if not isinstance(arguments, Mapping):
            raise ValueError(f"the arguments are no JSON object: {str(given)[:80]!r}")
    except (ValueError, RecursionError) as problem:
        return ToolCall(id, name, error=str(problem))
    return ToolCall(id, name, arguments)
