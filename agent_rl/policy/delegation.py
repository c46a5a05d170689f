"""Delegation: a policy gives parts of its task to itself, in contexts of their own.

The policy has one tool more, `delegate(task)`. Its call begins a sub-agent: the same weights, with the environment's
tools and nothing of the dialogue but the opening's system messages and what the call says. What the sub-agent answers
is the call's result; all that it did to find out costs the caller's context nothing. Its token ids are a trajectory of
the episode, trained with the episode's advantages as the caller's own are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from pydantic import Field

from agent_rl.config import Section
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.errors import ConfigError
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Conversation, FullContextError, Prefix, Reply

DELEGATE = ToolSpec(
    "delegate",
    "Give a part of the task to a sub-agent. It has your other tools, sees only what you write here, and answers once.",
    {
        "type": "object",
        "properties": {"task": {"type": "string", "description": "All that it needs to know."}},
        "required": ["task"],
        "additionalProperties": False,
    },
)
ALONE = "not done: a reply that delegates makes no other calls"
EXHAUSTED = "not done: there are no sub-agents left"
TASKLESS = "not done: delegate takes a task, all that the sub-agent needs to know, as a text"
SILENT = "the sub-agent gave no answer"


class Delegation(Section):
    """How often a policy may delegate, and for how long."""

    most: int = Field(4, ge=1)
    """Sub-agents an episode."""
    turns: int = Field(8, ge=1)
    """Replies of a sub-agent with calls of tools; the next one is its answer, whatever it is."""


class ContextConversation(Conversation, Protocol):
    """A conversation whose context may wait while another one of the episode goes on."""

    turn: int
    """The turn of the next reply."""

    def wait(self) -> None:
        """Free the engine's slot until the next reply."""
        ...


Begin: TypeAlias = Callable[[Sequence[Message], int], ContextConversation]
"""Begins a sub-agent with its first messages, in a turn of the episode."""


class DelegatingConversation:
    """A conversation and its sub-agents, one at a time.

    The environment gets the replies that call its tools, whoever gives them, and what it says goes to whom it answers.
    Calls of `delegate` and a sub-agent's answers stay within a turn, as a summary does: their tokens are in the
    trajectories, and the episode's messages don't have them.
    """

    def __init__(
        self, rule: Delegation, caller: ContextConversation, begin: Begin, prefix: Prefix | None = None
    ) -> None:
        self._rule, self._caller, self._begin = rule, caller, begin
        self._agent: ContextConversation | None = None
        """The sub-agent at work."""
        self._agents = 0 if prefix is None else prefix.agents
        self._replies = self._length = 0
        self._rules: list[Message] = [] if prefix is None else prefix.rules
        """The opening's system messages."""
        self._calls: list[ToolCall] = []
        """Calls of the caller that have no result yet; the first is the sub-agent's, if one is at work."""
        self._results: list[Message] = []

    @property
    def context_limit(self) -> int | None:
        """The engine's longest sequence, in tokens."""
        return self._caller.context_limit

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The token ids of all contexts, in the order in which they began."""
        return self._caller.trajectories

    def observe(self, messages: Sequence[Message]) -> int:
        """Tell the one whose turn it is what is new; return the length of its context in tokens."""
        if not self._caller.trajectories[0]:
            self._rules += [message for message in messages if message.role == "system"]
        self._length = (self._agent or self._caller).observe(messages)
        return self._length

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Return the next reply that is the environment's to answer.

        Raises:
            FullContextError: if a sub-agent's task, or its answer, leaves no room for one.
        """
        limit = None if max_tokens is None else max_tokens + self._length
        while True:
            room = None if limit is None else limit - self._length
            if room is not None and room < 1:
                raise FullContextError
            speaker = self._agent or self._caller
            reply = await speaker.reply(room)
            if reply.finish_reason is FinishReason.ABORT or not self._stays(reply):
                return reply
            speaker.turn -= 1  # nothing of it reached the environment
            self._hand_over(speaker.turn)

    def _stays(self, reply: Reply) -> bool:
        """Return whether a reply is none of the environment's, after noting what it asks for or answers."""
        calls = reply.message.tool_calls
        is_cut = reply.finish_reason is FinishReason.LENGTH
        if self._agent is None:
            if is_cut or not any(call.name == DELEGATE.name for call in calls):
                return False
            self._calls = [*calls]
            return True
        if calls and not is_cut and self._replies < self._rule.turns:
            self._replies += 1
            return False
        self._answer(self._calls.pop(0), reply.message.content.strip() or SILENT)
        return True

    def _hand_over(self, turn: int) -> None:
        """Begin the sub-agent of the next call, or give the caller its results."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        while self._calls:
            call = self._calls[0]
            task = call.arguments.get("task")
            if call.name != DELEGATE.name:
                self._answer(call, ALONE)
            elif call.error is not None or not isinstance(task, str) or not task.strip():
                self._answer(call, call.error or TASKLESS)
            elif self._agents >= self._rule.most:
                self._answer(call, EXHAUSTED)
            else:
                self._caller.wait()
                self._agents, self._replies = self._agents + 1, 0
                self._agent = self._begin([*self._rules, Message("user", task)], turn)
                self._length = self._agent.observe(())
                return
            self._calls.pop(0)
        self._caller.turn = turn
        results, self._results = self._results, []
        self._length = self._caller.observe(results)

    def _answer(self, call: ToolCall, content: str) -> None:
        self._results.append(Message("tool", content, tool_call_id=call.id, name=call.name))

    def close(self) -> None:
        """Give the engine's slots back."""
        for conversation in filter(None, (self._agent, self._caller)):
            conversation.close()


def require_free_name(tools: Sequence[ToolSpec]) -> None:
    """Refuse tools of which one is called as sub-agents are.

    Raises:
        ConfigError: if one is.
    """
    if any(tool.name == DELEGATE.name for tool in tools):
        raise ConfigError(f"the environment has a tool '{DELEGATE.name}' of its own: rename it, or leave out delegate")
