"""OpenAIPolicy: any model behind OpenAI's chat completions, by messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Annotated

from pydantic import Field, JsonValue

from agent_rl.core.messages import JSON, Message
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.core.usage import Usage
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import PolicyError
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import FullContextError, Prefix, Reply
from agent_rl.policy.by_name import register_policy
from agent_rl.policy.openai_client import CHARACTERS
from agent_rl.policy.openai_endpoint import connect
from agent_rl.policy.openai_failures import ContextOverflowError
from agent_rl.policy.openai_tally import Tally
from agent_rl.policy.openai_thread import ClientThread
from agent_rl.policy.openai_wire import ChatAnswer, read_message, request_message, request_messages
from agent_rl.rendering.chat_format import tool_dicts


@register_policy("openai")
@dataclass
class OpenAIPolicy:
    """A model of an OpenAI-compatible server; its episodes hold messages and usage, no token ids.

    The key is read from the environment, and stored nowhere. A `with` block checks address, key and model at its
    beginning and closes the connections at its end.

    Example::

        with ar.OpenAIPolicy("gpt-5-mini") as policy:
            print(ar.evaluate("calculator-v0", policy, n=32).success)
    """

    model: str
    _: KW_ONLY
    base_url: str | None = None
    """The server's address, such as http://host:8000/v1; None for OPENAI_BASE_URL, otherwise OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; a server at another address may need none."""
    params: SamplingParams | None = None
    """Temperature, top_p and the longest reply; None for the server's own."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    """Requests under way at most."""
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Of prompts and replies; before an answer says them they are estimated."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds of one attempt."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Attempts after the first, of one reply."""
    send_reasoning: bool = False
    """Whether later requests hold the reasoning of earlier replies; few servers take it."""
    check: bool = True
    """Whether to look for the model before the first episode."""
    extra: Mapping[str, JsonValue] | None = None
    """More of the request's body, such as reasoning_effort."""

    def __enter__(self) -> OpenAIPolicy:
        """Connect.

        Raises:
            ConfigError: if the server can't be reached, refuses the key or has no such model.
        """
        try:
            client = self._server.client
            if self.check:
                self._server.loop.wait(client.check())
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *raised: object) -> None:
        self.close()

    def start(self, tools: Sequence[ToolSpec], seed: int) -> OpenAIConversation:
        """Begin an episode; the seed is not sent, as few servers take one."""
        return OpenAIConversation(self, self._server, tools, seed)

    def resume(self, tools: Sequence[ToolSpec], seed: int, prefix: Prefix) -> OpenAIConversation:
        """Begin an episode in the middle: the first request holds the prefix's messages, whatever model wrote them."""
        conversation = OpenAIConversation(self, self._server, tools, seed, prefix.turn)
        conversation.observe(prefix.messages)
        return conversation

    def close(self) -> None:
        """Close the connections; the policy may be used again."""
        self._server.close()

    @cached_property
    def _server(self) -> ClientThread:
        return ClientThread("openai", lambda: connect(self.model, self, "policy"))

    def body(self, most: int | None) -> dict[str, JSON]:
        """Return what is the same in every request, and the longest reply."""
        out: dict[str, JSON] = {"model": self.model}
        limits = [n for n in (most, self.params.max_tokens if self.params else None) if n is not None]
        out |= self._server.client.limit(min(limits, default=None))
        extra: dict[str, JSON] = {}
        if (params := self.params) is not None:
            out["temperature"] = params.temperature
            cuts = {"top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p}
            extra = {name: value for name, value in cuts.items() if value != getattr(SamplingParams(), name)}
        return out | {"extra_body": {**extra, **(self.extra or {})}}


class OpenAIConversation:
    """One dialogue with a served model; every request holds all of it."""

    context_limit = None
    trajectories: tuple[Trajectory, ...] = ()

    def __init__(
        self,
        policy: OpenAIPolicy,
        server: ClientThread,
        tools: Sequence[ToolSpec],
        seed: int,
        turn: int = 0,
    ) -> None:
        self._policy, self._client, self._loop, self._seed = policy, server.client, server.loop, seed
        self._turn = turn
        """The turn of the next reply."""
        self._tools = tool_dicts(tools)
        self._messages: list[JSON] = []
        self._tallies: list[Tally] = []
        self._tokens = 0
        """Of the conversation up to the last reply, as the server counted."""
        self._unseen = len(json.dumps(self._tools)) if self._tools else 0
        """Characters that it has not counted yet."""

    @property
    def usage(self) -> tuple[Usage, ...]:
        """What each reply used."""
        return tuple(tally.usage() for tally in self._tallies)

    def observe(self, messages: Sequence[Message]) -> int:
        """Keep the messages for the next request; return the tokens up to the last reply, 0 before one."""
        self._messages += request_messages(messages, reasoning=self._policy.send_reasoning)
        self._unseen += sum(len(message.content) for message in messages)
        return self._tokens

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Ask for the next message.

        Raises:
            FullContextError: if the conversation has outgrown the model's context.
            PolicyError: if the server refuses, filters its answer, or no attempt succeeds.
        """
        tally = Tally(self._policy.model, self._seed)
        self._tallies.append(tally)
        body = self._policy.body(max_tokens) | {"messages": self._messages}
        if self._tools:
            body["tools"] = self._tools
        estimate = self._tokens + self._unseen / CHARACTERS
        try:
            answer = await self._loop.run(self._client.ask(body, estimate, tally))
        except ContextOverflowError:
            if not self._turn:  # the opening alone: no score of 0
                raise
            raise FullContextError from None
        return self._read(answer, tally.finish_reason)

    def _read(self, answer: ChatAnswer, finish_reason: str) -> Reply:
        assert answer.choices is not None
        if finish_reason == "content_filter":
            raise PolicyError(f"{self._client.address} filtered the reply (finish_reason content_filter)")
        message = read_message(answer.choices[0].message, self._turn)
        self._turn += 1
        self._messages.append(request_message(message, reasoning=self._policy.send_reasoning))
        if (used := answer.usage) is not None:
            self._tokens = (used.prompt_tokens or 0) + (used.completion_tokens or 0)
            self._unseen = 0
        return Reply(message, FinishReason.LENGTH if finish_reason == "length" else FinishReason.STOP)

    def close(self) -> None:
        """Hold nothing."""
