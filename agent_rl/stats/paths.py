"""Paths: what an episode did, move by move, to be compared with another of its task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from agent_rl.core.ending import Ending
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.sequences import shared_start
from agent_rl.core.turns import turns

LONGEST = 60
"""Characters of a name: a model may call a tool anything."""


class Kind(StrEnum):
    """What kind of move it is."""

    CALL = "call"
    ARGUMENT = "argument"
    UNREADABLE = "unreadable"
    """A call that could not be parsed."""
    REPLY = "reply"
    """A reply without a call, after which the conversation continued."""
    ANSWER = "answer"
    """A reply without a call, with which it ended."""
    RESULT = "result"
    """What the environment said to a reply."""
    END = "end"


class Move(NamedTuple):
    """One move without its content: a call is followed by its arguments, and a turn by its result."""

    turn: int
    kind: Kind
    name: str = ""
    """The tool; of a result, every tool that answered; of an end, its stop reason, or its ending if it failed."""
    key: str = ""
    """Of an argument, its name; of a result, the classes of its tool errors."""


class Path(NamedTuple):
    """An episode's moves, and a hash of each one's content; wording beside a call does not count."""

    moves: tuple[Move, ...]
    contents: tuple[int, ...]

    @property
    def calls(self) -> bool:
        """Whether it calls a tool."""
        return any(move.kind is Kind.CALL for move in self.moves)


def path_of(episode: Episode) -> Path:
    """Return the path of an episode; its opening is no move."""
    moves, contents = zip(*((move, hash(content)) for move, content in moves_of(episode)), strict=True)
    return Path(moves, contents)


def moves_of(episode: Episode) -> Iterator[tuple[Move, str]]:
    """Yield an episode's moves, each with its content."""
    _, *played = turns(episode)
    at = 0
    for turn in played:
        at = turn.index or 0
        reply, *results = turn.messages
        is_last = turn is played[-1]
        if not (is_last and episode.cut_in_reply):
            yield from _reply_moves(reply, at, is_last=is_last)
        if results:
            errors = " ".join(dict.fromkeys(m.tool_error for m in results if m.tool_error))
            tools = " ".join(dict.fromkeys(m.name or "" for m in results if m.role == "tool"))
            yield Move(at, Kind.RESULT, tools, errors), "\n".join(m.content for m in results)
    failed = episode.ending if episode.stop_reason is StopReason.ERROR else None
    is_unread = episode.ending is Ending.PARSE_ERROR
    yield Move(at, Kind.END, "" if is_unread else str(failed or episode.stop_reason)), ""


def _reply_moves(reply: Message, turn: int, *, is_last: bool) -> Iterator[tuple[Move, str]]:
    for call in reply.tool_calls:
        yield from _call_moves(call, turn)
    if not reply.tool_calls:
        yield Move(turn, Kind.ANSWER if is_last else Kind.REPLY), " ".join(reply.content.split())


def _call_moves(call: ToolCall, turn: int) -> Iterator[tuple[Move, str]]:
    if call.error is not None:
        yield Move(turn, Kind.UNREADABLE), call.error
        return
    name = call.name[:LONGEST]
    yield Move(turn, Kind.CALL, name), ""
    for key in sorted(call.arguments):
        value = json.dumps(call.arguments[key], ensure_ascii=False, sort_keys=True, default=str)
        yield Move(turn, Kind.ARGUMENT, name, key[:LONGEST]), value


def departs_at(path: Path, other: Path) -> int | None:
    """Return the first move in which a path differs from another; None if it does not.

    Where tools are called, what is said between calls counts only if all else is the same.
    """
    at = agreed(path, other)
    if at < len(path.moves):
        return at
    at = shared_start(path.contents, other.contents)
    return at if at < len(path.contents) else None


def agreed(path: Path, other: Path) -> int:
    """Return how many moves of a path are those of another, however a conversation with calls is worded."""
    may_say_anything = path.calls or other.calls
    for at, move, of_other in zip(count(), path.moves, other.moves, strict=False):
        is_talk = move.kind is Kind.REPLY or (move.kind is Kind.RESULT and not move.name)
        is_same = path.contents[at] == other.contents[at] or (is_talk and may_say_anything)
        if move != of_other or not is_same:
            return at
    return len(path.moves)


def phrase(path: Path, other: Path, at: int | None) -> str:
    """Return in words how a path departs from a successful one."""
    if at is None:
        return "same moves, other score"
    did, better = path.moves[at], other.moves[at]
    called = any(move.kind is Kind.CALL for move in path.moves[:at])
    match did.kind, better.kind:
        case Kind.ARGUMENT, Kind.ARGUMENT if did.key != better.key:
            return f"argument `{did.key}` of {did.name} instead of `{better.key}`"
        case Kind.ARGUMENT, Kind.ARGUMENT:
            return f"argument `{did.key}` of {did.name}"
        case Kind.ARGUMENT, _:
            return f"adds argument `{did.key}` to {did.name}"
        case ((Kind.CALL | Kind.RESULT | Kind.END), Kind.ARGUMENT):
            return f"leaves out argument `{better.key}` of {better.name}"
        case Kind.RESULT, Kind.CALL:
            return f"leaves out the call of {better.name}"
        case Kind.RESULT, Kind.RESULT if did.name:
            return f"same call of {did.name}, other result" + (f" ({did.key})" if did.key else "")
        case Kind.END, _:
            return _ended(did, better)
        case _, Kind.END | Kind.RESULT if did.kind is not Kind.CALL:
            return "same moves, other outcome"
        case _, _:
            return _replied(did, better, called, other.calls)


def _ended(did: Move, better: Move) -> str:
    if not did.name:
        return "a call that can't be read"
    if did.name == StopReason.LENGTH:
        return "cut in a reply (length)"
    if did.name in _BUDGETS:
        return f"cut by {did.name}"
    if did.name in (StopReason.DONE, StopReason.ENV_TRUNCATED):
        return f"ends instead of {_DOING[better.kind].format(better.name)}"
    return f"breaks off ({did.name})"


_BUDGETS = (StopReason.TURNS, StopReason.TOKENS, StopReason.TOOL_CALLS, StopReason.SECONDS)
_DOING = {
    Kind.CALL: "calling {}",
    Kind.ARGUMENT: "calling {}",
    Kind.UNREADABLE: "writing a call that can't be read",
    Kind.REPLY: "replying",
    Kind.ANSWER: "answering",
    Kind.RESULT: "continuing",
    Kind.END: "ending otherwise",
}


def _replied(did: Move, better: Move, called: bool, will_call: bool) -> str:
    """Return how a reply departs from a better one."""
    instead = _DOING[better.kind].format(better.name)
    match did.kind, better.kind:
        case Kind.UNREADABLE, _:
            return "a call that can't be read"
        case Kind.CALL, Kind.CALL:
            return f"calls {did.name} instead of {better.name}"
        case Kind.CALL, Kind.RESULT:
            return f"calls {did.name} as well"
        case Kind.CALL, _:
            return f"calls {did.name} instead of {instead}"
        case ((Kind.ANSWER | Kind.REPLY), Kind.UNREADABLE):
            return f"{'answers' if did.kind is Kind.ANSWER else 'talks'} instead of {instead}"
        case Kind.ANSWER, Kind.CALL:
            return f"answers instead of {instead}" if called else "answers without calling any tool"
        case (Kind.ANSWER, Kind.ANSWER) if called:
            return "same calls, other answer"
        case Kind.ANSWER, Kind.ANSWER:
            return "other answer"
        case Kind.ANSWER, Kind.REPLY:
            return "ends the conversation early" if will_call else "other reply"
        case Kind.REPLY, Kind.CALL:
            return f"talks instead of {instead}"
        case _, _:
            return "same calls, other reply" if called or will_call else "other reply"
