"""Cassette: what answers in the place of the world outside, while a recorded episode is played again."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from agent_rl.core.messages import Message, ToolCall
from agent_rl.gym.user import User


class Cassette(Protocol):
    """Answers from a record; `agent_rl.replay.cassette` has the one of stored episodes."""

    @property
    def goes_on(self) -> bool:
        """Whether the episode goes on behind the record, as a fork does, so that users will be asked."""
        ...

    def answer(self, call: ToolCall) -> Message | None:
        """Return the recorded answer to a call of a free function; None to make the call."""
        ...

    def user(self, own: User) -> User:
        """Return who speaks for a dialogue's user: the user, or the record."""
        ...


cassette: ContextVar[Cassette | None] = ContextVar("cassette", default=None)
"""Of the episode that is played again; None for all others."""
