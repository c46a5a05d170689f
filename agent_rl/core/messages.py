"""Messages, tool calls and steps: what an environment and a policy say to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
else:
    JSON = Any  # pydantic, which reads annotations, follows no recursive alias
Task: TypeAlias = Mapping[str, JSON]
"""What one episode is about; anything that JSON can hold. The same task may be sampled many times."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant", "tool")


class ToolErrorKind(StrEnum):
    """Why a tool call came back as an error message to the model."""

    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TIMEOUT = "timeout"
    EXCEPTION = "exception"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asked for; `error` says why it could not be parsed."""

    id: str
    name: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, with OpenAI's roles and names."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    tool_error: ToolErrorKind | None = None
    """Set on a tool message that reports an error instead of a result."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"Message(role={self.role!r}): the roles are {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise TypeError(f"Message(content={self.content!r}): give a str; no text is an empty one")


@dataclass(frozen=True, slots=True)
class Step:
    """Gymnasium's five-tuple, with messages for the observation."""

    observation: tuple[Message, ...] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    def __post_init__(self) -> None:
        try:
            is_finite = math.isfinite(self.reward)
        except TypeError:
            raise TypeError(f"Step(reward={self.reward!r}): give a number") from None
        if not is_finite:
            raise ValueError(f"Step(reward={self.reward!r}): give a finite number")


def without_nan(value: JSON) -> JSON:
    """Return a value with None in the place of every NaN, at any depth: JSON has none."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
