"""Dialogues: a user to whom the policy talks between its tool calls; `ModelUser` is in agent_rl/policy/user.py."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

from agent_rl.concurrency import call
from agent_rl.core.messages import Message, Step
from agent_rl.errors import UserError
from agent_rl.gym.cassette import cassette
from agent_rl.gym.env import ToolEnv
from agent_rl.gym.user import User

UserScript: TypeAlias = Generator[str, Message, None]
"""Plays a user: yields what the user says, is sent the policy's answer."""


class ScriptedUser:
    """A user without a model: a list of replies, or a script; rules answer what is asked."""

    def __init__(
        self, replies: Sequence[str] | Callable[[], UserScript], rules: Mapping[str, str] | None = None
    ) -> None:
        """Make the user.

        Args:
            replies: said one after the other, until there are none; or a function that makes a script, which plays
                from its beginning for each reply and so must not depend on anything that changes.
            rules: regular expressions, in any case, with what is said to a message in which they are found; the texts
                of all that are found are said. A message that meets a rule uses up no reply.
        """
        self._replies = replies
        self._rules = [(re.compile(pattern, re.IGNORECASE), text) for pattern, text in (rules or {}).items()]

    def reply(self, messages: Sequence[Message]) -> str | None:
        """Answer by the rules, or with the next reply."""
        heard = [m for m in messages if m.role == "assistant"]
        if heard and (found := self._answers(heard[-1])):
            return " ".join(found)
        unruly = [m for m in heard if not self._answers(m)]
        if not callable(self._replies):
            return self._replies[len(unruly)] if len(unruly) < len(self._replies) else None
        script = self._replies()
        try:
            said = next(script)
            for message in unruly:
                said = script.send(message)
        except StopIteration:
            return None
        script.close()
        return said

    def _answers(self, message: Message) -> list[str]:
        return [text for pattern, text in self._rules if pattern.search(message.content)]


class DialogueEnv(ToolEnv):
    """An environment with tools and a user: a message without calls is said to the user, who may end the episode.

    `reset` of a subclass sets `user` and returns `await self.open_dialogue(...)`.
    """

    user: User
    dialogue: tuple[Message, ...] = ()
    """What the policy and the user have said to each other: what a snapshot has to keep, and rewards look at."""

    async def open_dialogue(self, system: str = "") -> tuple[Message, ...]:
        """Return the opening: the system message, if there is one, and what the user says first.

        Raises:
            UserError: if the user says nothing.
        """
        first = (await self._ask_user()).observation
        if not first:
            raise UserError("the user ended the dialogue before it began: let them say something first")
        return (Message("system", system), *first) if system else tuple(first)

    async def on_answer(self, action: Message) -> Step:
        """Say the message to the user."""
        self.dialogue = (*self.dialogue, Message("assistant", action.content))
        return await self._ask_user()

    async def _ask_user(self) -> Step:
        thread = f"{type(self).__name__}.user" if self.blocking else None
        recorded = cassette.get()
        user = self.user if recorded is None else recorded.user(self.user)
        self.asking = True
        text = await call(functools.partial(user.reply, self.dialogue), thread=thread)
        self.asking = False
        if text is None:
            return Step(terminated=True)
        said = Message("user", text)
        self.dialogue = (*self.dialogue, said)
        return Step((said,))
