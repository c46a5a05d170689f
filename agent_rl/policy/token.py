"""TokenPolicy: a renderer in front of an inference engine; the episode is a token-id list from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.engines.base import InferenceEngine, SamplingParams
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Prefix, Reply
from agent_rl.policy.interruption import Interruption, sample_reply
from agent_rl.rendering.base import Renderer


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """Any engine that takes and gives token ids; implements `Policy` and `Resumable`."""

    engine: InferenceEngine
    renderer: Renderer
    params: SamplingParams = field(default_factory=SamplingParams)
    interrupt: Interruption | None = None
    """What is done about replies that go on for too long; None lets their limit end them."""

    def __post_init__(self) -> None:
        """Check the interruption.

        Raises:
            ConfigError: if it would never happen, or end the reply itself.
        """
        if self.interrupt is None:
            return
        if self.interrupt.per == "reply" and self.interrupt.after_tokens >= self.params.max_tokens:
            raise ConfigError(
                f"interrupt.after_tokens={self.interrupt.after_tokens} leaves nothing of a reply's "
                f"max_tokens={self.params.max_tokens} for the answer: lower it, or raise max_tokens"
            )
        if not self.renderer.stop_ids.isdisjoint(self.interrupt.ids):
            raise ConfigError(
                "interrupt.text holds a token that ends a reply, so that no answer could follow: leave it out"
            )

    def start(self, tools: Sequence[ToolSpec], seed: int) -> TokenConversation:
        """Begin an episode."""
        return TokenConversation(self, tools, seed)

    def resume(self, tools: Sequence[ToolSpec], seed: int, prefix: Prefix) -> TokenConversation:
        """Begin an episode in the middle."""
        return TokenConversation(self, tools, seed, prefix)


class TokenConversation:
    """Appends what the environment said and what the engine sampled; nothing is ever rendered twice.

    A renderer that can't prove that its rendering is an append answers with None; the conversation then forks: the
    whole dialogue is rendered anew as the prompt of a new trajectory, where no token is trained a second time. A
    prefix, too, is a prompt: its ids are given to the engine as they are, and what was sampled in it has no loss here.
    """

    def __init__(self, policy: TokenPolicy, tools: Sequence[ToolSpec], seed: int, prefix: Prefix | None = None) -> None:
        self._policy, self._tools, self._seed = policy, tools, seed
        self._session = policy.engine.open(seed)
        self._trajectories = [Trajectory()]
        self._messages: list[Message] = []
        self._turn = 0
        self._context: list[int] = []
        """Every id before the last reply, as the engine saw it."""
        self._reply: tuple[int, ...] = ()
        self._pending: list[tuple[list[int], Source]] = []
        """Ids to append with the next reply: they join the trajectory when the engine gets them."""
        self._forked: Fork | None = None
        """Where they branch off, if they begin a new trajectory."""
        self._sampled = 0
        """How many tokens the episode has sampled."""
        if prefix is not None:
            self._messages = list(prefix.messages)
            self._turn = prefix.turn
            self._pending = [(list(prefix.token_ids), Source.PROMPT)]

    @property
    def context_limit(self) -> int | None:
        """The engine's longest sequence, in tokens."""
        return self._policy.engine.context_limit

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The token ids so far, one trajectory and its forks."""
        return tuple(self._trajectories)

    def observe(self, messages: Sequence[Message]) -> int:
        """Render what is new; return the context's length in tokens, the new ones included."""
        self._messages += messages
        renderer = self._policy.renderer
        if self._pending and not messages:
            pass  # a prefix, which is rendered already
        elif not self._context:
            self._pending = [(renderer.prompt(self._messages, self._tools), Source.PROMPT)]
        else:
            bridge = renderer.bridge(self._context, self._reply, messages, self._tools)
            if bridge is None:
                self._fork(renderer.prompt(self._messages, self._tools))
            else:
                self._pending = [(list(bridge.closing), Source.TEMPLATE), (list(bridge.ids), Source.ENV)]
        return len(self._context) + len(self._reply) + sum(len(ids) for ids, _ in self._pending)

    def _fork(self, prompt: list[int]) -> None:
        old = [*self._context, *self._reply]
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, prompt, strict=False)))
        self._forked = Fork(len(self._trajectories) - 1, shared)
        self._session.close()
        self._session = self._policy.engine.open(self._seed + len(self._trajectories))
        self._context, self._reply = [], ()
        self._pending = [(prompt, Source.PROMPT)]

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Sample a reply and read it; `max_tokens` also counts what an interruption puts into it."""
        if not self._pending:
            raise PolicyError("observe what the environment said before asking for a reply")
        policy, interrupt = self._policy, self._policy.interrupt
        new = [i for ids, _ in self._pending for i in ids]
        pieces = await sample_reply(
            self._session,
            new,
            policy.params,
            policy.renderer.stop_ids,
            room=max_tokens,
            interrupt=interrupt,
            point=interrupt.point(self._seed, self._turn, self._sampled) if interrupt else 0,
        )
        if self._forked is not None:
            self._trajectories.append(Trajectory(self._forked))
            self._forked = None
        trajectory = self._trajectories[-1]
        for ids, source in self._pending:
            # a reply's closing tokens belong to its own turn, everything else opens the present one
            trajectory.append(ids, source, self._turn - (source is Source.TEMPLATE))
        self._context += self._reply
        self._context += new
        self._reply, self._pending = (), []
        finish_reason = FinishReason.STOP
        for piece in pieces:
            if isinstance(piece, Completion):
                trajectory.append_completion(piece, self._turn)
                self._reply += piece.token_ids
                self._sampled += len(piece.token_ids)
                finish_reason = piece.finish_reason
            else:
                trajectory.append(piece, Source.TEMPLATE, self._turn)
                self._reply += piece
        message = self._policy.renderer.parse(self._reply, self._context, self._tools)
        calls = tuple(replace(c, id=f"call_{self._turn}_{i}") for i, c in enumerate(message.tool_calls))
        message = replace(message, tool_calls=calls)
        self._messages.append(message)
        self._turn += 1
        return Reply(message, finish_reason)

    def close(self) -> None:
        """Give the engine's slot back."""
        self._session.close()
