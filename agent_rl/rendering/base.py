"""The Renderer protocol: messages → token ids to *append*, sampled ids → message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agent_rl.core.making import made_quickly
from agent_rl.core.messages import Message
from agent_rl.gym.tool import ToolSpec


@made_quickly
@dataclass(frozen=True, slots=True)
class Bridge:
    """The ids between one sampled reply and the next."""

    closing: tuple[int, ...]
    """What the template wants after the reply and the policy did not sample (its newline; a missing end of turn)."""
    ids: tuple[int, ...]
    """The environment's messages and the header that opens the policy's next reply."""


@runtime_checkable
class Renderer(Protocol):
    """Turns messages into ids to append; earlier ids are never rewritten."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a reply."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Render the whole conversation up to the header that opens the policy's reply."""
        ...

    def bridge(
        self, prefix: Sequence[int], reply: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> Bridge | None:
        """Render the ids behind `prefix + reply`; None if they can't be proven to be an append.

        Args:
            prefix: every id before the last sampled reply.
            reply: the ids of that reply, with its stop id if it was sampled.
            messages: the environment's new messages.
            tools: the tools that the prompt was rendered with; some families need them to read the reply.
        """
        ...

    def parse(self, reply: Sequence[int], prefix: Sequence[int] = (), tools: Sequence[ToolSpec] = ()) -> Message:
        """Read a sampled reply; a malformed tool call becomes a `ToolCall` with `error` set, never an exception.

        Args:
            reply: the ids of the reply, with its stop id if it was sampled.
            prefix: every id before it; it says whether the prompt has already opened a thought.
            tools: the tools of the prompt; XML formats tell the string "true" from a boolean by their schemas.
        """
        ...

    def reply(self, message: Message) -> list[int]:
        """Render an assistant message as a policy would have sampled it, stop id included (for scripts only)."""
        ...
