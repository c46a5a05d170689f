"""Hermes-style replies: `<think>` a thought `</think>`, an answer, `<tool_call>` compact JSON `</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from agent_rl.core.messages import JSON, Message, ToolCall
from agent_rl.errors import RenderError

THINK, THINK_END = "<think>", "</think>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
NESTED = 100
"""How deep a call's JSON may be: what is much deeper can't be stored, and would end its run."""
_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')


def read_hermes(text: str) -> Message:
    """Read a decoded reply, without its end-of-turn token; a malformed call becomes a `ToolCall` with `error`."""
    reasoning, text = _split_thought(text)
    content, *bodies = text.split(OPEN)
    calls = []
    for index, body in enumerate(bodies):
        inside, closed, stray = body.partition(CLOSE)
        calls.append(read_call(inside, index, stray=stray, closed=bool(closed)))
    return Message("assistant", content.strip() if calls else content, reasoning=reasoning, tool_calls=tuple(calls))


def _split_thought(text: str) -> tuple[str | None, str]:
    if not text.lstrip().startswith(THINK):
        return None, text
    thought, _, answer = text.lstrip().removeprefix(THINK).partition(THINK_END)
    return thought.strip() or None, answer.lstrip("\n")


def write_call(call: ToolCall, space: str = "") -> str:
    """Write `{"name":…,"arguments":{…}}`, with `space` behind every comma and colon.

    Raises:
        RenderError: if an argument is nothing that JSON can hold.
    """
    try:
        return json.dumps(
            {"name": call.name, "arguments": dict(call.arguments)},
            ensure_ascii=False,
            separators=(f",{space}", f":{space}"),
            allow_nan=False,
        )
    except (TypeError, ValueError) as error:
        raise RenderError(f"arguments of {call.name!r} that JSON can't hold ({error}): {call.arguments!r}") from error


def spell_call(call: ToolCall) -> str:
    """Write a call with its tags, a line each, as Hermes 2 Pro and Qwen do.

    Raises:
        RenderError: if an argument is nothing that JSON can hold.
    """
    return f"{OPEN}\n{write_call(call, ' ')}\n{CLOSE}"


def read_call(text: str, index: int, stray: str = "", closed: bool = True) -> ToolCall:
    """Read the text of a `<tool_call>`; a mistake becomes the call's `error`.

    Args:
        text: between the tags.
        index: which call of its reply it is; gives the id `call_<index>`.
        stray: behind the closing tag.
        closed: whether there was a closing tag.
    """
    id = f"call_{index}"
    try:
        if not closed:
            raise ValueError(f"{OPEN} is not closed by {CLOSE}")
        name, arguments = _name_and_arguments(text)
    except (ValueError, RecursionError) as problem:
        return ToolCall(id, _name_in(text), error=str(problem))
    if stray.strip():
        return ToolCall(id, name, arguments, f"text after {CLOSE}: {_short(stray)}; say it before the first {OPEN}")
    return ToolCall(id, name, arguments)


def read_json(text: str) -> JSON:
    """Read JSON that a model wrote.

    Raises:
        ValueError: if it is none, is nested too deep, or holds a number or text that JSON has not.
    """
    try:
        value: JSON = _DECODER.decode(text)
        require_shallow(value, text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error}): {_short(text)}") from error
    return value


def require_shallow(value: JSON, text: str) -> None:
    """Refuse a value, written as a text, that is nested too deep.

    Raises:
        ValueError: if it is.
    """
    if text.count("[") + text.count("{") <= NESTED:
        return
    level: Sequence[JSON] = [value]
    for _ in range(NESTED + 1):
        inner = [x.values() if isinstance(x, Mapping) else x for x in level if isinstance(x, Mapping | list)]
        level = [item for items in inner for item in items]
    if level:
        raise ValueError(f"nested more than {NESTED} deep: {_short(text)}")


def _name_and_arguments(text: str) -> tuple[str, dict[str, JSON]]:
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError(f'not a JSON object with "name" and "arguments": {_short(text)}')
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError(f'"name" is missing or no string: {_short(text)}')
    if not isinstance(arguments, dict):
        raise ValueError(f'"arguments" is not a JSON object: {_short(text)}')
    return name, arguments


def _name_in(text: str) -> str:
    """The name that a malformed call seems to mean, or an empty string."""
    found = _NAME.search(text)
    try:
        return str(json.loads(found[1])) if found else ""
    except ValueError:
        return ""


def _finite(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _not_finite(text)


def _not_finite(text: str) -> float:
    raise ValueError(f"{_short(text)} is not a finite number")


_DECODER = json.JSONDecoder(parse_constant=_not_finite, parse_float=_finite)


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
