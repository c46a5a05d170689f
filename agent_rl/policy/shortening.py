"""Shortening: how a context that has grown too long is rewritten, as a declared fork of the token list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from agent_rl.config import Section
from agent_rl.core.messages import Message

DROPPED = "[dropped]"
"""What a tool's result becomes when it is dropped."""
REQUEST = (
    "The conversation is too long. Summarise all that is needed to finish the task; only the summary will be kept."
)
"""What the policy is asked for a summary with."""
SUMMARY = "\n\nSummary of the conversation so far:\n"
"""What comes between the opening and the summary."""


class Shortening(Section):
    """When and how a context is rewritten; what comes of it is the prompt of a fork, a further row for the trainer."""

    rule: Literal["drop_tool_results", "summarise"]
    """`drop_tool_results` empties the oldest results of tools. `summarise` asks the policy for a summary, which is
    sampled and trained as its replies are, and continues from the opening and the summary."""
    over_tokens: int = Field(ge=1)
    """Of the context before a reply, the new observation included. Well below what the engine holds: a summary is
    sampled on top of it."""
    keep: int = Field(1, ge=0)
    """Results of tools that are not dropped, the newest; those that no reply has answered yet stay in any case."""

    @property
    def request(self) -> Message | None:
        """What the policy is asked before the rewrite."""
        return Message("user", REQUEST) if self.rule == "summarise" else None

    def rewrite(self, messages: Sequence[Message], summary: str = "", examples: int = 0) -> list[Message]:
        """Return the messages to continue from; the same ones if nothing can be left out.

        Args:
            messages: of the present context.
            summary: what the policy answered to the request, if there is one.
            examples: how many replies the opening shows, which are none of the policy's.
        """
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if self.rule == "drop_tool_results":
            results = [i for i, message in enumerate(messages) if message.role == "tool"]
            dropped = {i for i in results[: max(0, len(results) - self.keep)] if i < replies[-1]}
            return [replace(m, content=DROPPED) if i in dropped else m for i, m in enumerate(messages)]
        return summarised(messages[: replies[examples]], summary)


def summarised(opening: Sequence[Message], summary: str) -> list[Message]:
    """Return an opening with a summary of what followed, in the place of an earlier one."""
    *first, last = opening
    return [*first, replace(last, content=last.content.partition(SUMMARY)[0] + SUMMARY + summary)]
