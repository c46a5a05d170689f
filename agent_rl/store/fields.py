"""Typed reads from a stored JSON object: a missing or mistyped field is named, an unknown one is left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias, TypeVar

from agent_rl.core.messages import JSON
from agent_rl.errors import DamagedEpisodeError

Row: TypeAlias = Mapping[str, JSON]
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def damaged(name: str, expected: str, value: object) -> DamagedEpisodeError:
    """Return the error for a field that holds something else than it should."""
    return DamagedEpisodeError(f"the field {name!r} should be {expected}, not {_short(value)}")


def required(row: Row, name: str) -> JSON:
    """Return a field that must be there."""
    try:
        return row[name]
    except KeyError:
        raise DamagedEpisodeError(f"the field {name!r} is missing; there are: {', '.join(row) or 'none'}") from None


def text(row: Row, name: str) -> str:
    """Return a required string."""
    return _of(row, name, str, "a string")


def integer(row: Row, name: str) -> int:
    """Return a required integer."""
    return _int(required(row, name), name)


def number(row: Row, name: str) -> float:
    """Return a required number, as a float."""
    value = required(row, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise damaged(name, "a number", value)
    return float(value)


def boolean(row: Row, name: str) -> bool:
    """Return a required boolean."""
    return _of(row, name, bool, "true or false")


def optional_text(row: Row, name: str) -> str | None:
    """Return a string, or None where the field is absent or null."""
    return None if row.get(name) is None else text(row, name)


def optional_integer(row: Row, name: str) -> int | None:
    """Return an integer, or None where the field is absent or null."""
    return None if row.get(name) is None else integer(row, name)


def choice(row: Row, name: str, kind: type[E]) -> E:
    """Return a required member of an enumeration."""
    value = required(row, name)
    try:
        return kind(value)  # type: ignore[arg-type]  # anything that is not a member raises ValueError
    except ValueError:
        raise damaged(name, f"one of {', '.join(kind)}", value) from None


def mapping(row: Row, name: str) -> Row:
    """Return a required object."""
    return as_mapping(required(row, name), name)


def optional_mapping(row: Row, name: str) -> Row:
    """Return an object, or an empty one where the field is absent."""
    return mapping(row, name) if name in row else {}


def sequence(row: Row, name: str) -> Sequence[JSON]:
    """Return a required array."""
    return _of(row, name, list, "an array")


def rows(row: Row, name: str) -> list[Row]:
    """Return a required array of objects."""
    return [as_mapping(item, name) for item in sequence(row, name)]


def integers(value: JSON, name: str, length: int) -> list[int]:
    """Return an array of exactly `length` integers."""
    if not isinstance(value, list) or len(value) != length:
        raise damaged(name, f"{length} integers", value)
    return [_int(item, name) for item in value]


def as_mapping(value: JSON, name: str) -> Row:
    """Return `value` if it is an object."""
    if not isinstance(value, dict):
        raise damaged(name, "an object", value)
    return value


def _int(value: JSON, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise damaged(name, "an integer", value)
    return value


def _of(row: Row, name: str, kind: type[T], expected: str) -> T:
    value = required(row, name)
    if not isinstance(value, kind):
        raise damaged(name, expected, value)
    return value


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
