"""Messages, tool calls and steps: what an environment and a policy say to each other."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agent_rl.core.images import Image
from agent_rl.core.making import made_quickly
from agent_rl.errors import ConfigError

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


@made_quickly
@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asked for; `error` says why it could not be parsed."""

    id: str
    name: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    error: str | None = None


@made_quickly
@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, with OpenAI's roles and names.

    `content` is always text. What a user or a tool shows besides is in `parts`, and each image a line in `content`:
    `Message("user", parts=["What is this?", image])`.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    tool_error: ToolErrorKind | None = None
    """Set on a tool message that reports an error instead of a result."""
    parts: Sequence[str | Image] = ()
    """Texts and images, in order; empty where there is only text. `content` follows from them."""

    def __post_init__(self) -> None:
        if self.parts:
            _set_content(self)
        if self.role not in ROLES:
            raise ValueError(f"Message(role={self.role!r}): the roles are {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise TypeError(f"Message(content={self.content!r}): give a str; no text is an empty one")
        if self.tool_calls:
            _check_calls(self.tool_calls)
        if not (self.tool_call_id is self.name is self.tool_error is self.reasoning is None):
            _check_texts(self)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images among its parts."""
        return tuple(part for part in self.parts if isinstance(part, Image)) if self.parts else ()


def _check_texts(message: Message) -> None:
    """Refuse what no file would give back; make a kind of error of its text.

    Raises:
        TypeError: if one is no text.
        ValueError: if there is no such kind of error.
    """
    for attribute in ("tool_call_id", "name", "reasoning"):
        if not isinstance(value := getattr(message, attribute), str | None):
            raise TypeError(f"Message({attribute}={value!r:.40}): give a str, or None")
    if message.tool_error is not None:
        object.__setattr__(message, "tool_error", ToolErrorKind(message.tool_error))


def _check_calls(calls: Sequence[ToolCall]) -> None:
    """Refuse calls that are written as other libraries do.

    Raises:
        TypeError: if they are no sequence of calls, or one has an id or a name that is no text, or arguments that are
            no dict.
    """
    for call in (None,) if isinstance(calls, ToolCall) else calls:
        if not isinstance(call, ToolCall):
            raise TypeError(f"tool_calls={calls!r}: give a tuple of ar.ToolCall(id, name, arguments)")
        if not (isinstance(call.id, str) and isinstance(call.name, str)):
            raise TypeError(f"ToolCall({call.id!r:.40}, {call.name!r:.40}): give two texts, its id and its tool's name")
        if not isinstance(call.arguments, (dict, Mapping)):  # the former is found faster
            raise TypeError(f"ToolCall(arguments={call.arguments!r}): give a dict; json.loads makes one of JSON")


def _set_content(message: Message) -> None:
    """Derive the text of a message with parts.

    Raises:
        TypeError: if a part is neither a text nor an image.
        ValueError: if its role has no images, or it has another content, too.
    """
    if isinstance(message.parts, str) or not all(isinstance(part, str | Image) for part in message.parts):
        raise TypeError("Message(parts=...): give a list of texts and images; ar.Image.of makes an image of a file")
    if message.role not in ("user", "tool"):
        raise ValueError(f"Message({message.role!r}, parts=...): only user and tool messages hold images; give content")
    content = "\n".join(map(str, message.parts))
    if message.content not in ("", content):
        raise ValueError("Message(content=..., parts=...): give one of them; content is made of the parts")
    object.__setattr__(message, "parts", tuple(message.parts))
    object.__setattr__(message, "content", content)


def images_in(messages: Iterable[Message]) -> list[Image]:
    """Return the images of messages, in order."""
    return [image for message in messages if message.parts for image in message.images]


Observation: TypeAlias = str | Image | Message | Sequence[Message] | Sequence[str | Image]


@made_quickly
@dataclass(frozen=True, slots=True)
class Step:
    """Gymnasium's five-tuple, with messages for the observation, or what stands for them as in `Env.reset`."""

    observation: tuple[Message, ...] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    if TYPE_CHECKING:  # what an environment may give; whoever reads a step has messages

        def __init__(
            self, observation: Observation = (), reward: float = 0, terminated: bool = False, truncated: bool = False
        ) -> None: ...

    def __post_init__(self) -> None:
        plain = type(self.reward) is float and type(self.terminated) is type(self.truncated) is bool
        if not (plain and math.isfinite(self.reward)):
            _check_step(self)


def _check_step(step: Step) -> None:
    """Raise TypeError or ValueError where a step says something else than a finite number and two truth values."""
    try:
        is_finite = math.isfinite(step.reward)
    except TypeError:
        raise TypeError(f"Step(reward={step.reward!r}): give a number") from None
    except OverflowError:  # an int that no float holds
        is_finite = False
    if not is_finite:
        raise ValueError(f"Step(reward={step.reward!r:.40}): give a finite number")
    for name, value in (("terminated", step.terminated), ("truncated", step.truncated)):
        if value not in (True, False):
            raise TypeError(f"Step({name}={value!r:.40}): give True or False")


def own_task(task: Mapping[str, object]) -> Task:
    """Return a task's copy for one episode, as a file gives it back: with lists for tuples, text for keys.

    Raises:
        ConfigError: if a key is no text, which JSON would make one.
    """
    copied: Task = _copied(task)
    return copied


def own_calls(message: Message) -> Message:
    """Return a message whose calls have copies of their arguments, which whoever answers it may change."""
    if not message.tool_calls:
        return message
    calls = [ToolCall(call.id, call.name, _copied(call.arguments), call.error) for call in message.tool_calls]
    return Message(message.role, message.content, message.reasoning, tuple(calls), message.tool_call_id, message.name)


_TEXT, _FIXED = frozenset((str,)), frozenset((str, int, float, bool, type(None)))


def _copied(value: Any) -> Any:
    """Copy a value deeply; what JSON makes, many times as fast as `deepcopy`, which keeps a record."""
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is dict or isinstance(value, Mapping):
        if not _TEXT.issuperset(map(type, value)):
            _check_keys(value)
        if _FIXED.issuperset(map(type, value.values())):
            return dict(value)
        return {key: _copied(item) for key, item in value.items()}
    if kind is list or (isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)):
        return [_copied(item) for item in value]
    return copy.deepcopy(value)


def _check_keys(value: Mapping[object, object]) -> None:
    """Raise ConfigError for a key that is no text; a kind of `str` is one."""
    if strange := [key for key in value if not isinstance(key, str)]:
        raise ConfigError(
            f"a task has the key {strange[0]!r}, which would come back from a file as text: write it as text"
        )


def without_nan(value: JSON) -> JSON:
    """Return a value with None in the place of every NaN and infinity, at any depth: JSON has none."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
