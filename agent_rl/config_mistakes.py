"""What is wrong with settings, in our words: which of pydantic's errors matter, and what each means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel

from agent_rl.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_BRANCH = re.compile(r"str|int|float|bool|(tuple|list|dict|literal)\[.*")
"""How pydantic calls a kind of value among several, in the place of an error."""


def relevant(errors: Sequence[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Yield the errors without those that only follow: of a list whose items are wrong, and of kinds it might be."""
    for error in errors:
        where, kind = error["loc"], error["type"]
        inner = [e for e in errors if len(e["loc"]) > len(where) and e["loc"][: len(where)] == where]
        beside = [e for e in errors if e["loc"][: len(where) - 1] == where[:-1] and e["loc"][: len(where)] != where]
        is_branch = bool(where) and _is_branch(where[-1]) and kind.endswith("_type")
        is_other_kind = is_branch and any(len(e["loc"]) > len(where) or not e["type"].endswith("_type") for e in beside)
        if not is_other_kind and not (kind == "too_short" and inner):
            yield error


def _is_branch(part: int | str) -> bool:
    """Whether a part of a place is no key, but the kind of value, of several, that was tried there."""
    return isinstance(part, str) and bool(_BRANCH.fullmatch(part))


def place(where: tuple[int | str, ...]) -> str:
    """Return the place of an error as a key."""
    return ".".join(map(str, where))


def _name(where: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in where if not _is_branch(part))
    return "".join(parts).removeprefix(".")


def explain(error: ErrorDetails, schema: type[BaseModel]) -> str:
    """Return in our words what pydantic found wrong with a setting."""
    where, message, value = error["loc"], error["msg"], error["input"]
    if error["type"] == "extra_forbidden":
        *section, key = where
        within = f" in {_name(tuple(section))}" if section else ""
        return f"no key '{key}'{within}.{did_you_mean(str(key), _keys_in(schema, section))}"
    name, message = _name(where), message[0].lower() + message[1:]
    if not isinstance(value, dict):
        return f"{name}={value!r}: {message}"
    message = message.removeprefix("value error, ")  # about settings that don't go together: the message names them
    return f"{name}: {message}" if name else message


def _keys_in(schema: type[BaseModel], section: Sequence[int | str]) -> list[str]:
    """Return the keys that a section at a place may have."""
    models = [schema]
    for part in section:
        fields = [f for m in models for name, f in m.model_fields.items() if part in (name, f.alias)]
        models = [model for field in fields for model in _models(field.annotation)] or models
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _models(kind: object) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _models(inner)
