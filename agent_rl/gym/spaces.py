"""Gymnasium's spaces as text: observations described, actions explained, written and read."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from agent_rl.core.messages import JSON
from agent_rl.errors import DefinitionError

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w)")
_MOST = 1000  # numbers of an observation that are written out
_EDGE = 1e-4  # how far rounding may push a number over its bound


def describe(space: Space[Any], value: object, names: Sequence[str] = ()) -> str:
    """Return an observation as text.

    Args:
        space: its space.
        value: the observation.
        names: of the parts of a vector or tuple.
    """
    if isinstance(space, Dict):
        parts = cast(Mapping[str, object], value)
        return "\n".join(f"{key}: {describe(part, parts[key])}" for key, part in space.spaces.items())
    if isinstance(space, Tuple):
        each = [describe(part, one) for part, one in zip(space.spaces, cast(Iterable[object], value), strict=True)]
        return ", ".join(_named(each, names))
    if isinstance(space, Box | MultiDiscrete | MultiBinary):
        return _numbers(np.asarray(value), names)
    return str(value)


def explain(space: Space[Any], names: Sequence[str] = ()) -> str:
    """Return what an action of a space has to be; `names` are those of the actions of a `Discrete`."""
    if isinstance(space, Discrete):
        last = int(space.start + space.n) - 1
        return _either(names) if names else f"a whole number from {int(space.start)} to {last}"
    if isinstance(space, Box):
        low, high = (_numbers(b if len(np.unique(b)) > 1 else b.reshape(-1)[:1]) for b in (space.low, space.high))
        return f"{_count(space.shape, 'number')} from {low} to {high}"
    if isinstance(space, MultiDiscrete):
        ranges = ", ".join(f"{start} to {start + n - 1}" for start, n in _ranges(space))
        return f"{_count(space.shape, 'whole number')} from {ranges}"
    if isinstance(space, MultiBinary):
        return f"{_count(space.shape, 'number')}, each 0 or 1"
    if isinstance(space, Text):
        return f"text of {space.min_length} to {space.max_length} characters"
    if isinstance(space, Dict):
        return "a JSON object with " + ", ".join(f'"{key}": {explain(part)}' for key, part in space.spaces.items())
    if isinstance(space, Tuple):
        return "a JSON list of " + "; ".join(explain(part) for part in space.spaces)
    raise DefinitionError(f"actions of {space} have no text form: define parse(self, text) and say in `instructions`")


def read(space: Space[Any], text: str, names: Sequence[str] = ()) -> object:
    """Return the action in a text; of several, the last.

    Raises:
        ValueError: if it means none.
    """
    action = _meant(space, text, names)
    if action is None:
        raise ValueError(f"there is no action in {reprlib.repr(text)}")
    if not space.contains(action):
        raise ValueError(f"{reprlib.repr(text)} is out of range")
    return action


def write(space: Space[Any], action: object, names: Sequence[str] = ()) -> str:
    """Return a text that `read` reads as the action."""
    plain = _plain(space, action, names)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _meant(space: Space[Any], text: str, names: Sequence[str]) -> object:
    """Return the action in a text, None if there is none; it may be out of range."""
    if isinstance(space, Text):
        return text.strip()
    if isinstance(space, Dict | Tuple):
        return _parts(space, text)
    if isinstance(space, Discrete):
        return _choice(space, text, names)
    if isinstance(space, Box | MultiDiscrete | MultiBinary):
        return _array(space, text)
    raise DefinitionError(f"actions of {space} have no text form: define parse(self, text)")


def _choice(space: Discrete, text: str, names: Sequence[str]) -> object:
    by_name = {name.lower(): index for index, name in enumerate(names)}
    longest = sorted(by_name, key=len, reverse=True)
    found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)", text.lower()) if names else []
    if found:
        return np.int64(space.start + by_name[found[-1]])
    numbers = [float(number) for number in _NUMBER.findall(text)]
    return np.int64(numbers[-1]) if numbers and numbers[-1].is_integer() and abs(numbers[-1]) < 2**62 else None


def _array(space: Box | MultiDiscrete | MultiBinary, text: str) -> object:
    numbers = [float(number) for number in _NUMBER.findall(text)]
    size = math.prod(space.shape)
    if len(numbers) < size:
        return None
    values = np.array(numbers[len(numbers) - size :]).reshape(space.shape)
    if not np.isfinite(values).all() or (np.abs(values) > 2**62).any():
        return None
    if isinstance(space, Box):
        inside = np.clip(values, space.low, space.high)
        values = np.where(np.abs(values - inside) <= _EDGE, inside, values)
    action = values.astype(space.dtype)
    is_float = np.issubdtype(action.dtype, np.floating)
    return action if is_float or (action == values).all() else None  # else 0.5 were 0, and 300 a byte


def _parts(space: Dict | Tuple[Any], text: str) -> object:
    first, last = "{}" if isinstance(space, Dict) else "[]"
    try:
        value = json.loads(text[text.index(first) : text.rindex(last) + 1])
    except (ValueError, RecursionError):
        return None
    if isinstance(space, Tuple):
        if len(value) != len(space.spaces):
            return None
        return tuple(read(part, _said(one)) for part, one in zip(space.spaces, value, strict=True))
    if value.keys() != space.spaces.keys():
        return None
    return {key: read(part, _said(value[key])) for key, part in space.spaces.items()}


def _said(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _plain(space: Space[Any], action: Any, names: Sequence[str] = ()) -> JSON:
    if isinstance(space, Discrete):
        return names[int(action - space.start)] if names else int(action)
    if isinstance(space, Dict):
        return {key: _plain(part, action[key]) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return [_plain(part, one) for part, one in zip(space.spaces, action, strict=True)]
    if isinstance(space, Box):
        return cast(JSON, np.vectorize(lambda number: float(f"{number:.5g}"))(np.asarray(action, float)).tolist())
    return cast(JSON, np.asarray(action).tolist())


def _numbers(value: np.ndarray[Any, Any], names: Sequence[str] = ()) -> str:
    """Return an array as text: a number, `[1, 2]`, or a line per row."""
    if value.size > _MOST:
        return np.array2string(value, threshold=_MOST, precision=3, separator=", ")
    if value.ndim == 0 or value.shape == (1,):
        return ", ".join(_named([_number(value.item())], names))
    if value.ndim == 1:
        each = [_number(number) for number in value.tolist()]
        return ", ".join(_named(each, names)) if names else f"[{', '.join(each)}]"
    if value.ndim == 2:
        return "\n".join(_numbers(row) for row in value)
    return "\n".join(_numbers(row).replace("\n", " ") for row in value)


def _number(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(int(value))


def _named(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    return [f"{name} {part}" for name, part in zip(names, parts, strict=True)] if names else list(parts)


def _either(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _count(shape: tuple[int, ...] | None, what: str) -> str:
    size = math.prod(shape or ())
    return f"one {what}" if size == 1 else f"{size} {what}s"


def _ranges(space: MultiDiscrete) -> list[tuple[int, int]]:
    return [(int(start), int(n)) for start, n in zip(space.start.flat, space.nvec.flat, strict=True)]
