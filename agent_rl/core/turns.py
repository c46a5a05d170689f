"""Turns: a conversation cut at the policy's replies, and the question that it opens with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message

_READ = 4000
"""The characters of a message that a question is taken from."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the policy with its answer, or the messages before the first reply."""

    index: int | None
    """None for the messages before the first reply."""
    messages: tuple[Message, ...]
    reward: float | None = None
    """What the environment gave for this turn; None before the first, and for a turn that broke off."""


def turns(episode: Episode) -> Iterator[Turn]:
    """Yield the conversation turn by turn, the opening messages first.

    An episode that failed in the middle of a turn has messages beyond its steps; they form a turn without a reward.
    """
    at = _opening(episode)
    yield Turn(None, episode.messages[:at])
    for index, step in enumerate(episode.steps):
        stop = at + 1 + step.messages
        yield Turn(index, episode.messages[at:stop], step.reward)
        at = stop
    if at < len(episode.messages):
        yield Turn(len(episode.steps), episode.messages[at:])


def replies(episode: Episode) -> tuple[Message, ...]:
    """Return what the policy said, in its order; replies that the opening shows as an example are none of it."""
    return tuple(turn.messages[0] for turn in turns(episode) if turn.index is not None and turn.messages)


def opening_question(episode: Episode) -> str:
    """Return the beginning of the first user message on one line (not cleaned), or an empty string."""
    asked = next((m.content for m in episode.messages if m.role == "user"), "")
    return " ".join(asked[:_READ].split())


def _opening(episode: Episode) -> int:
    """Return how many messages are before the first reply.

    They are what the steps leave over, less a reply at the end that has no step because its turn broke off.
    """
    messages = episode.messages
    left = max(0, len(messages) - sum(1 + step.messages for step in episode.steps))
    replies_next = left < len(messages) and messages[left].role == "assistant"
    broken_off = left > 0 and not replies_next and messages[-1].role == "assistant"
    return left - 1 if broken_off else left
