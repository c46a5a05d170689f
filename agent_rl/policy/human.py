"""HumanPolicy: a person plays; what they type is read as an answer or as tool calls."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import Any, TypeAlias, cast

from agent_rl.concurrency import CallingThread
from agent_rl.core.messages import JSON, Message, ToolCall
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.errors import did_you_mean
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Prefix, Reply

CALL = "/call"
"""What a line begins with that calls a tool."""
_JSON = json.JSONDecoder()
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', re.DOTALL)
"""A whole value in quotes, which are not of it; quotes within a value, as in len("x"), are."""
_BEFORE_JSON = re.compile(r"([^\s='\"]+=)?(?=[\[{])")


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is to answer."""

    messages: Sequence[Message]
    """What was said since their last reply."""
    tools: Sequence[ToolSpec]
    turn: int


Ask: TypeAlias = Callable[[Question], Message]


class QuitError(Exception):
    """The person plays no further turn."""


class UndoError(Exception):
    """The person wants to take their last reply back."""


@dataclass(frozen=True, slots=True)
class HumanPolicy:
    """A person who is asked; implements `Policy` and `Resumable`."""

    ask: Ask
    """May raise `QuitError` and `UndoError`."""
    thread: CallingThread | None = None
    """Which thread asks; None for the event loop's own."""

    def start(self, tools: Sequence[ToolSpec], seed: int) -> HumanConversation:
        """Begin an episode."""
        return HumanConversation(self, tools)

    def resume(self, tools: Sequence[ToolSpec], seed: int, prefix: Prefix) -> HumanConversation:
        """Begin an episode in the middle; the person sees what was said before."""
        return HumanConversation(self, tools, prefix.turn, list(prefix.messages))


@dataclass(slots=True)
class HumanConversation:
    """One dialogue with a person."""

    policy: HumanPolicy
    tools: Sequence[ToolSpec]
    turn: int = 0
    unseen: list[Message] = field(default_factory=list)
    context_limit: int | None = None
    trajectories: tuple[Trajectory, ...] = ()

    def observe(self, messages: Sequence[Message]) -> int:
        """Keep the messages for the next question."""
        self.unseen += messages
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Ask the person."""
        ask = partial(self.policy.ask, Question(tuple(self.unseen), self.tools, self.turn))
        message = ask() if self.policy.thread is None else await self.policy.thread.call(ask)
        self.unseen.clear()
        self.turn += 1
        return Reply(message, FinishReason.STOP)

    def close(self) -> None:
        """Hold nothing."""


def read_reply(text: str, tools: Sequence[ToolSpec], turn: int) -> Message:
    """Return what a person typed as a message: lines that begin with /call are tool calls, the others the text.

    Raises:
        ValueError: if a call does not fit the tools, or a line is one without /call; the message says what to write.
    """
    lines = text.split("\n")
    for tool in tools if len(lines) == 1 else ():
        names = "|".join(map(re.escape, cast(Mapping[str, Any], tool.parameters).get("properties", {})))
        if re.match(rf"\s*{re.escape(tool.name)}(\s*\{{|\s+({names or '(?!)'})=)", text):
            raise ValueError(f"a tool is called by {CALL}: write {CALL} {text.strip()}")
    wanted = [line.partition(CALL)[2].strip() for line in lines if _is_call(line)]
    said = "\n".join(line for line in lines if not _is_call(line))
    calls = (ToolCall(f"call_{turn}_{i}", *_read_call(call, tools)) for i, call in enumerate(wanted))
    return Message("assistant", said.strip() if wanted else said, tool_calls=tuple(calls))


def _is_call(line: str) -> bool:
    return line.split(maxsplit=1)[:1] == [CALL]


def _read_call(text: str, tools: Sequence[ToolSpec]) -> tuple[str, Mapping[str, JSON]]:
    name, _, rest = text.partition(" ")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise ValueError(f"no tool '{name}'.{did_you_mean(name, [tool.name for tool in tools])} There are: {names}.")
    return name, _read_arguments(rest.strip(), tool)


def _read_arguments(text: str, tool: ToolSpec) -> Mapping[str, JSON]:
    schema = cast(Mapping[str, Any], tool.parameters)
    properties, form = schema.get("properties", {}), f"{CALL} {signature(tool)}"
    if text.startswith("{"):
        try:
            return cast(Mapping[str, JSON], json.loads(text))
        except ValueError as error:
            raise ValueError(f"the arguments are no JSON ({error}); write {form}") from None
    try:
        words = _words(text)
    except ValueError as error:
        raise ValueError(f"{error}; write {form}") from None
    pairs = [word.partition("=") for word in words]
    if all(equals and name in properties for name, equals, _ in pairs):
        arguments = {name: _typed(value, properties[name]) for name, _, value in pairs}
    elif len(properties) == 1 and not any(equals and name in properties for name, equals, _ in pairs):
        # its name goes without saying
        ((name, only),) = properties.items()
        arguments = {name: _typed(words[0] if _QUOTED.fullmatch(text) else text, only)}
    else:
        wrong = next("=".join(filter(None, pair[::2])) for pair in pairs if not pair[1] or pair[0] not in properties)
        raise ValueError(f"{wrong!r} is no argument; write {form}")
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        raise ValueError(f"{', '.join(missing)} is missing; write {form}")
    return arguments


def _words(text: str) -> list[str]:
    """Return the words of a line as a shell does; JSON in braces or brackets, and quotes within a value, stay."""
    words = list[str]()
    while text := text.lstrip():
        name = _BEFORE_JSON.match(text)
        try:
            end = _JSON.raw_decode(text, name.end())[1] if name else 0
        except ValueError:
            end = 0
        lexer = shlex.shlex(rest := StringIO(text), posix=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        word = text[:end] if end else cast(str, lexer.get_token())
        after = text[end:] if end else rest.read()
        typed = text[: len(text) - len(after)].rstrip()
        is_quoted = _QUOTED.fullmatch(typed.partition("=")[2]) or _QUOTED.fullmatch(typed)
        words.append(word if is_quoted or not {*typed} & {*"'\""} else typed)
        text = after
    return words


def _typed(text: str, schema: Mapping[str, Any]) -> JSON:
    """Return a word as its schema wants it: a text as it is, anything else as JSON."""
    kinds = {kind for each in (schema, *schema.get("anyOf", ())) for kind in _kinds(each)}
    if "string" in kinds or ("enum" in schema and text in schema["enum"]):
        return text
    try:
        return cast(JSON, json.loads(text))
    except ValueError:
        return text


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else kind


def signature(tool: ToolSpec) -> str:
    """Return how a tool is called, as `search query=... [k=5]`: what is optional in brackets, with its default."""
    schema = cast(Mapping[str, Any], tool.parameters)
    words = [tool.name]
    for name, own in schema.get("properties", {}).items():
        default = json.dumps(own["default"]) if "default" in own else "..."
        words.append(f"{name}=..." if name in schema.get("required", ()) else f"[{name}={default}]")
    return " ".join(words)
