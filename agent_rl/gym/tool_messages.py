"""What a model reads of its tool calls: a result as text, or in a line what went wrong."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json, to_jsonable_python

from agent_rl.core.images import Image
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.errors import InfrastructureError, did_you_mean

NO_FORM = "has no JSON form; return "
"""In the error that a model reads in the place of a result that can't be written."""
_ERROR_LENGTH = 500  # characters of an exception's message that the model gets to read


def as_text(value: object) -> str:
    """Return a tool's result as the model reads it: text as it is, None as nothing, all else as compact JSON.

    Sets, also in other containers, are lists in order: numbers, then the rest by its text.

    Raises:
        TypeError: if the value has no JSON form.
    """
    if isinstance(value, str):
        return str.__str__(value)  # of an enum, its value
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(float(value))
    ordered = _in_order(value)
    try:
        return to_json(ordered, fallback=_plain).decode()
    except PydanticSerializationError:  # which can't say what it is about, nor write half a surrogate pair
        return json.dumps(ordered, default=_jsonable, ensure_ascii=False, separators=(",", ":"))


def _in_order(value: object) -> object:
    """Return containers with a list for each set, whose own order is that of the process's hashes: no replay has it."""
    if isinstance(value, dict):
        return {key: _in_order(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_order(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_in_order, value), key=_rank)
    if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__pydantic_serializer__"):
        return {field.name: _in_order(getattr(value, field.name)) for field in fields(value)}
    return value


def _rank(value: object) -> tuple[float, str]:
    return (value if isinstance(value, int | float) else math.inf), as_text(value)


def _jsonable(value: object) -> object:
    try:
        return to_jsonable_python(value, fallback=_plain)
    except UnicodeDecodeError:
        raise TypeError(f"a container of bytes or images {NO_FORM}images alone or in a list") from None


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a result of type {type(value).__name__} {NO_FORM}text, numbers or containers")


def result_message(call: ToolCall, value: object, most: int) -> Message:
    """Return what a call returned; of each text the model reads `most` characters, its head and its tail."""
    if isinstance(value, Image) or (isinstance(value, list | tuple) and any(isinstance(v, Image) for v in value)):
        given = (value,) if isinstance(value, Image) else value
        parts = [v if isinstance(v, Image) else _shortened(as_text(v), most) for v in given]
        return Message("tool", tool_call_id=call.id, name=call.name, parts=parts)
    return Message("tool", _shortened(as_text(value), most), tool_call_id=call.id, name=call.name)


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = most // 2
    gap = f"\n[... {len(text) - most} characters left out ...]\n"
    return text[: most - tail] + gap + text[len(text) - tail :]


def failure_message(call: ToolCall, kind: ToolErrorKind, complaint: str) -> Message:
    """Return what was wrong with a call, in a line."""
    content = "error: " + _one_line(complaint)
    return Message("tool", content, tool_call_id=call.id, name=call.name, tool_error=kind)


def exception_message(call: ToolCall, error: BaseException) -> Message:
    """Return a tool's exception as a message; raise an infrastructure failure again."""
    if isinstance(error, InfrastructureError):
        raise error
    message = str(error)
    name = type(error).__name__
    return failure_message(call, ToolErrorKind.EXCEPTION, f"{name}: {message}" if message else name)


def explain(error: ValidationError, parameters: Sequence[str]) -> str:
    """Return which arguments are wrong, and how, in a line; `parameters` are the tool's."""
    return "bad arguments: " + "; ".join(_explain_one(detail, parameters) for detail in error.errors())


def _explain_one(detail: ErrorDetails, parameters: Sequence[str]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{where}: missing"
    if detail["type"] == "extra_forbidden":
        hint = did_you_mean(where, parameters) if len(detail["loc"]) == 1 else ""
        return f"{where}: no such argument.{hint}"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{where}: {message} (got {reprlib.repr(detail['input'])})"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_LENGTH else line[: _ERROR_LENGTH - 1] + "…"
