"""Record: a stored episode as what its replay needs: replies to give, and what they led to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from agent_rl.core.episode import Episode, Outcome, StopReason
from agent_rl.core.messages import Message
from agent_rl.core.turns import turns
from agent_rl.errors import StoreError


@dataclass(frozen=True)
class Record:
    """An episode, cut at its replies."""

    episode: Episode

    @cached_property
    def opening(self) -> tuple[Message, ...]:
        """The messages before the first reply."""
        return next(turns(self.episode)).messages

    @cached_property
    def turns(self) -> tuple[tuple[Message, tuple[Message, ...]], ...]:
        """Each reply, with the observation that it led to.

        Raises:
            StoreError: if the steps don't fit the messages.
        """
        found = []
        for turn in turns(self.episode):
            if turn.index is None or (turn.index == len(self.episode.steps) and self.failure):  # it broke off
                continue
            if turn.index == len(self.episode.steps):
                raise StoreError("there are messages behind the last step: the steps don't fit the messages")
            if not turn.messages or turn.messages[0].role != "assistant":
                raise StoreError(f"turn {turn.index} begins with no reply: the steps don't fit the messages")
            found.append((turn.messages[0], turn.messages[1:]))
        return tuple(found)

    @cached_property
    def replies(self) -> tuple[Message, ...]:
        """What the policy said."""
        return tuple(reply for reply, _ in self.turns)

    @cached_property
    def answered(self) -> int:
        """How many replies the environment answered: all, or all but the last, which the record pads."""
        episode = self.episode
        steps = episode.steps
        if not steps:
            return 0
        last, stop = steps[-1], episode.stop_reason
        if episode.outcome is Outcome.FAILED:
            is_answered = bool(last.messages or last.terminated or last.reward)
        elif stop in (StopReason.LENGTH, StopReason.TOOL_CALLS):
            is_answered = False
        else:
            is_answered = stop not in (StopReason.TOKENS, StopReason.SECONDS) or not last.truncated
        return len(steps) - (not is_answered)

    @property
    def cut(self) -> str:
        """Why the last reply's answer can't be known; an empty string if it can, or there was to be none."""
        if self.answered == self.episode.turns:
            return ""
        if self.episode.stop_reason is StopReason.SECONDS:
            return "the budget's seconds ran out within the step"
        return self.failure

    @property
    def failure(self) -> str:
        """What broke the episode; an empty string if nothing did."""
        if self.episode.outcome is not Outcome.FAILED:
            return ""
        error = self.episode.error
        return f"the episode failed in {error.where}: {error.type}: {error.message[:200]}" if error else "it failed"


def contents(messages: Sequence[Message]) -> str:
    """Return messages as one text, to show."""
    return "\n".join(f"{message.role}: {message.content}" for message in messages)
