"""The Policy protocol: it answers an environment's messages, in one conversation per episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, TypeAlias, runtime_checkable

from agent_rl.core.making import made_quickly
from agent_rl.core.messages import Message, images_in
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.errors import ConfigError, PolicyError, RenderError
from agent_rl.gym.env import Env
from agent_rl.gym.tool import ToolSpec


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first turns of an earlier dialogue, up to a reply of the policy."""

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    """Exactly what the engine had seen by then; none where another tokenizer wrote them, or none did."""
    turn: int
    """The turn of the reply to come."""
    sampled: int | None = 0
    """How many tokens the policy sampled in them, in all contexts; None where nobody knows."""
    seed: int | None = None
    """The episode's; None for the conversation's own."""
    agents: int = 0
    """How many sub-agents were begun in them, save before an earlier continuation."""
    context: tuple[Message, ...] = ()
    """What the ids say, where a summary stands for a part of the messages; none where they say all of them."""

    @property
    def rules(self) -> list[Message]:
        """The opening's system messages."""
        opening = takewhile(lambda message: message.role != "assistant", self.messages)
        return [message for message in opening if message.role == "system"]


@made_quickly
@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a policy; `message` is what the sampled tokens say."""

    message: Message
    finish_reason: FinishReason
    is_full: bool = False
    """Whether it was cut because its context holds no more, whoever's of the conversation that is."""


class FullContextError(PolicyError):
    """The context holds no further reply: an episode ends there, and has not failed."""

    def __init__(self) -> None:
        super().__init__("the context is full: it leaves no room for a reply")


class Conversation(Protocol):
    """One episode's dialogue with a policy."""

    @property
    def context_limit(self) -> int | None:
        """The longest context that the policy can hold, in tokens; None if it knows no limit."""
        ...

    def observe(self, messages: Sequence[Message]) -> int:
        """Store what the environment said; return the context's length in tokens (0 if it has none).

        A resumed conversation has observed its prefix: it gets no messages before its first reply.
        """
        ...

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Answer what was observed, in at most `max_tokens` sampled tokens (None: the policy's own limit).

        Raises:
            FullContextError: if what the policy said before its answer leaves no room for one.
        """
        ...

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The token ids so far; empty for a policy that deals in messages only."""
        ...

    def close(self) -> None:
        """Free what the conversation holds (a cache slot, a connection)."""
        ...


class Policy(Protocol):
    """Starts one conversation per episode; many may be open at a time."""

    def start(self, tools: Sequence[ToolSpec], seed: int) -> Conversation:
        """Begin an episode.

        Args:
            tools: what may be called.
            seed: of the conversation's random draws.
        """
        ...


@runtime_checkable
class Resumable(Protocol):
    """A policy that can continue an earlier episode, from its token ids or its messages."""

    def resume(self, tools: Sequence[ToolSpec], seed: int, prefix: Prefix) -> Conversation:
        """Begin an episode in the middle.

        The first trajectory starts with the prefix's ids as its prompt, if there are any. A policy without tokens reads
        the messages.
        """
        ...


@runtime_checkable
class EnvPolicy(Protocol):
    """Plays with the environment in view: a script, never a trained policy."""

    def start_in(self, env: Env, seed: int) -> Conversation:
        """Begin an episode of `env`, which was reset."""
        ...


AnyPolicy: TypeAlias = Policy | EnvPolicy
"""What an episode can be run with."""


def require_resumable(policy: AnyPolicy) -> Resumable:
    """Return a policy.

    Raises:
        PolicyError: if it can't continue an episode.
    """
    if not isinstance(policy, Resumable):
        raise PolicyError(f"{type(policy).__name__} can't continue an episode: it has no resume(tools, seed, prefix)")
    return policy


def unread(error: RenderError, messages: Sequence[Message], env: str) -> RenderError | ConfigError:
    """Return what to raise where a conversation could not observe messages: of an image, what names the environment."""
    return ConfigError(f"{env}: {error}") if images_in(messages) else error
