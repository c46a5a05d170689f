"""What JSON lacks: halves of surrogate pairs, written as U+FDD0 and four hex digits, and numbers of NumPy's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar, cast

ESCAPE = "\ufdd0"  # a noncharacter, which no text should hold; where one does, it is escaped too
_UNSAFE = re.compile(f"[\ud800-\udfff{ESCAPE}]")
_ESCAPED = re.compile(f"{ESCAPE}([0-9a-f]{{4}})")
T = TypeVar("T")


def plain(value: object) -> object:
    """Turn what means a JSON value into one: any mapping, and NumPy's scalars."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"{value!r} of type {type(value).__name__}; use numbers, strings, lists and objects")


def escape(text: str) -> str:
    """Return a text without halves of surrogate pairs."""
    return _UNSAFE.sub(lambda found: f"{ESCAPE}{ord(found[0]):04x}", text)


def unescape(text: str) -> str:
    """Return what `escape` was given."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


def with_strings(value: T, change: Callable[[str], str]) -> T:
    """Return the same value with all of its strings changed, at any depth."""
    changed: object = value
    if isinstance(value, str):
        changed = type(value)(change(value))
    elif isinstance(value, Mapping):
        changed = {with_strings(key, change): with_strings(item, change) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        changed = type(value)(with_strings(item, change) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        changed = replace(value, **{f.name: with_strings(getattr(value, f.name), change) for f in fields(value)})
    return cast(T, changed)
