"""The cassette of a stored episode: tools that reach outside, and users, answer from the record.

| what is asked | cassette | live |
|---|---|---|
| a tool that is a free function: MCP, web, remote search | the record | runs |
| a tool with a `self`: it may change the environment, or its sandbox | runs | runs |
| a user that a model plays (`ModelUser`) | the record | the record |
| a `ScriptedUser` | runs | runs |
| a user of another class | the record | runs |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_rl.core.messages import Message, ToolCall
from agent_rl.errors import StoreError
from agent_rl.gym.dialogue import ScriptedUser
from agent_rl.gym.user import User
from agent_rl.policy.user import ModelUser
from agent_rl.replay.record import Record


class NotRecordedError(StoreError):
    """Something was asked in the replay that was not asked in the episode."""


class RecordedAnswers:
    """Answers from one episode, turn by turn; implements `Cassette`."""

    def __init__(self, record: Record, *, outside: bool, goes_on: bool = False) -> None:
        """Begin before the first turn.

        Args:
            record: the episode.
            outside: whether all that reaches outside answers from it, or only users that a model plays.
            goes_on: whether the episode goes on behind it.
        """
        self._record, self._outside, self.goes_on = record, outside, goes_on
        self._turn = -1
        self._left: list[tuple[ToolCall, Message]] = []

    def begin(self, turn: int) -> None:
        """Begin a turn: its calls are to be made now."""
        reply, observation = self._record.turns[turn]
        answers = [message for message in observation if message.role == "tool"]
        self._turn, self._left = turn, []
        for call in reply.tool_calls:
            found = next((m for m in answers if m.tool_call_id == call.id), None)
            if found is not None:
                answers.remove(found)
                self._left.append((call, found))

    def answer(self, call: ToolCall) -> Message | None:
        """Return the answer to the first call of the turn with this name and arguments.

        Raises:
            NotRecordedError: if there is none.
        """
        if not self._outside:
            return None
        for at, (asked, message) in enumerate(self._left):
            if asked.name == call.name and asked.arguments == call.arguments:
                del self._left[at]
                return replace(message, tool_call_id=call.id)
        raise NotRecordedError(f"{call.name}({dict(call.arguments)}) has no answer in turn {self._turn} of the record")

    def user(self, own: User) -> User:
        """Return the record in the place of a user that a model, or something outside, plays."""
        if isinstance(own, ModelUser) or (self._outside and not isinstance(own, ScriptedUser)):
            return self
        return own

    def reply(self, messages: Sequence[Message]) -> str | None:
        """Say what the user said in this turn; None where that ended the dialogue.

        Raises:
            NotRecordedError: if the user said nothing in it.
        """
        record, turn = self._record, self._turn
        said = record.opening if turn < 0 else record.turns[turn][1]
        words = next((m.content for m in reversed(said) if m.role == "user"), None)
        if words is None and (turn < 0 or not record.episode.steps[turn].terminated):
            raise NotRecordedError(f"the user says nothing in turn {turn} of the record")
        return words
