"""TokenPolicy: a renderer in front of an inference engine; the episode is a token-id list from end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.sequences import shared_start
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.engines.base import InferenceEngine, SamplingParams
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import FullContextError, Prefix, Reply
from agent_rl.policy.delegation import DELEGATE, DelegatingConversation, Delegation, require_free_name
from agent_rl.policy.interruption import Interruption, Piece, sample_reply
from agent_rl.policy.shortening import Shortening
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.chat_format import require_text


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """Any engine that takes and gives token ids; implements `Policy` and `Resumable`."""

    engine: InferenceEngine
    renderer: Renderer
    params: SamplingParams = field(default_factory=SamplingParams)
    interrupt: Interruption | None = None
    """How overlong replies are made to answer; None lets their limit end them."""
    shorten: Shortening | None = None
    """How a context that has grown too long is rewritten; None lets it grow until the budget ends the episode."""
    delegate: Delegation | None = None
    """Whether it may give parts of its task to sub-agents, and how often."""

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

    def start(self, tools: Sequence[ToolSpec], seed: int) -> TokenConversation | DelegatingConversation:
        """Begin an episode.

        Raises:
            ConfigError: if one of the tools is called as that for sub-agents.
        """
        return self._begin(tools, seed)

    def resume(
        self, tools: Sequence[ToolSpec], seed: int, prefix: Prefix
    ) -> TokenConversation | DelegatingConversation:
        """Begin an episode in the middle.

        Raises:
            ConfigError: as `start` does, or if an interruption counts tokens that the prefix does not know of.
        """
        return self._begin(tools, seed, prefix)

    def shown(self, tools: Sequence[ToolSpec]) -> Sequence[ToolSpec]:
        """Return the tools that its prompts show: an environment's, and that of sub-agents."""
        return tools if self.delegate is None else [*tools, DELEGATE]

    def _begin(
        self, tools: Sequence[ToolSpec], seed: int, prefix: Prefix | None = None
    ) -> TokenConversation | DelegatingConversation:
        if self.delegate is None:
            return TokenConversation(self, tools, seed, prefix)
        require_free_name(tools)
        caller = TokenConversation(self, self.shown(tools), seed, prefix)

        def begin(messages: Sequence[Message], turn: int) -> TokenConversation:
            own = replace(prefix or Prefix((), (), 0), messages=tuple(messages), token_ids=(), turn=turn, context=())
            return TokenConversation(self, tools, seed, own, caller)

        return DelegatingConversation(self.delegate, caller, begin, prefix)


class TokenConversation:
    """Appends observations and replies as token ids; renders no message twice.

    A renderer that can't prove that its rendering is an append answers with None; the conversation then forks: the
    whole dialogue is rendered as the prompt of a new trajectory, where no token is trained a second time. `shorten`
    forks, too, with the dialogue rewritten. A prefix is a prompt: the engine gets its ids as they are, and what was
    sampled in it has no loss here. A sub-agent's conversation shares its caller's list of trajectories and its seeds.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        tools: Sequence[ToolSpec],
        seed: int,
        prefix: Prefix | None = None,
        caller: TokenConversation | None = None,
    ) -> None:
        self._policy, self._tools = policy, tools
        self._seed, self._sampled = _counted_from(prefix, policy.interrupt, seed)
        self._seeds: Iterator[int] = count(seed) if caller is None else caller._seeds
        """Of the engine's sequences, one after the other."""
        self._session = policy.engine.open(next(self._seeds))
        self._trajectories: list[Trajectory] = [] if caller is None else caller._trajectories
        self._at = len(self._trajectories)
        """Which of them is the context."""
        self._trajectories.append(Trajectory(None if caller is None else caller._called()))
        self._messages: list[Message] = []
        self._examples = 0
        """Replies that the environment's opening shows."""
        self._waited = False
        """Whether the engine has to be given the whole context again."""
        self.turn = 0
        """The turn of the next reply."""
        self._pending: list[tuple[Sequence[int], Source]] = []
        """Ids to append with the next reply: they join the trajectory when the engine gets them."""
        self._fork: Fork | None = None
        """Where they branch off, if they begin a new trajectory."""
        self._asks = False
        """Whether they end with a request for a summary."""
        if prefix is not None:
            self._messages = list(prefix.context or prefix.messages)
            self._examples = max(0, _replies_in(prefix.messages) - prefix.turn)
            self.turn = prefix.turn
            ids = prefix.token_ids or policy.renderer.prompt(self._messages, tools)
            self._pending = [(ids, Source.PROMPT)]

    @property
    def context_limit(self) -> int | None:
        """The engine's longest sequence, in tokens."""
        return self._policy.engine.context_limit

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The token ids so far: one trajectory, and its forks."""
        return tuple(self._trajectories)

    def observe(self, messages: Sequence[Message]) -> int:
        """Render what is new; return the context's length in tokens, the new ones included.

        Raises:
            RenderError: if it holds an image.
        """
        require_text(messages)
        if not self._messages:
            self._examples = _replies_in(messages)
        self._messages += messages
        trajectory = self._trajectories[self._at]
        if messages or not self._pending:  # a prefix is rendered already
            self._render(self._messages, messages if trajectory else None)
        rule = self._policy.shorten
        if rule is not None and trajectory and self._length > rule.over_tokens:
            self._shorten(rule, messages)
        return self._length

    @property
    def _length(self) -> int:
        """The context's length in tokens, what is to be appended included."""
        return (0 if self._fork else len(self._trajectories[self._at])) + sum(len(ids) for ids, _ in self._pending)

    def _shorten(self, rule: Shortening, new: Sequence[Message]) -> None:
        """Rewrite the context, or end it with the request for a summary."""
        if rule.request is not None:
            self._asks = True
            self._render([*self._messages, rule.request], [*new, rule.request] if self._fork is None else None)
        elif (rewritten := rule.rewrite(self._messages)) != self._messages:
            self._messages = rewritten
            self._render(rewritten)

    def _render(self, messages: Sequence[Message], new: Sequence[Message] | None = None) -> None:
        """Append the new ones of the messages, where the renderer can; else begin a trajectory with all of them."""
        renderer, trajectory = self._policy.renderer, self._trajectories[self._at]
        bridge = None if new is None else renderer.bridge(*trajectory.split_reply(), new, self._tools)
        if bridge is not None:
            self._pending = [(bridge.closing, Source.TEMPLATE), (bridge.ids, Source.ENV)]
            return
        prompt = renderer.prompt(messages, self._tools)
        self._pending = [(prompt, Source.PROMPT)]
        if trajectory:
            shared = shared_start(trajectory.token_ids.tolist(), prompt)
            self._fork = Fork(self._at, shared, trajectory.is_delegated)
            self.wait()
            self._waited = False

    def _called(self) -> Fork:
        """Return where a sub-agent begins that is called now."""
        return Fork(self._at, 0, delegated=True, called_at=len(self._trajectories[self._at]))

    def wait(self) -> None:
        """Free the engine's slot until the next reply, before which the engine is given all ids again."""
        self._session.close()
        self._session = self._policy.engine.open(next(self._seeds))
        self._waited = True

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Sample a reply and read it; `max_tokens` also counts what an interruption puts into it."""
        if not self._pending:
            raise PolicyError("observe what the environment said before asking for a reply")
        if self._asks:
            max_tokens = await self._summarise(max_tokens)
        if max_tokens is not None and max_tokens < 1:  # a summary may take more tokens as text than were sampled
            raise FullContextError
        pieces = await self._sample(max_tokens)
        trajectory = self._append_pending()
        length, finish_reason = len(trajectory), FinishReason.STOP
        for piece in pieces:
            if isinstance(piece, Completion):
                trajectory.append_completion(piece, self.turn)
                finish_reason = piece.finish_reason
            else:
                trajectory.append(piece, Source.TEMPLATE, self.turn)
        message = self._read(trajectory)
        self._messages.append(message)
        self.turn += 1
        is_cut = finish_reason is FinishReason.LENGTH
        return Reply(
            message, finish_reason, is_cut and max_tokens is not None and len(trajectory) - length >= max_tokens
        )

    async def _sample(self, room: int | None) -> list[Piece]:
        """Give the engine what it has not got yet; return the pieces of the reply."""
        policy, interrupt, point = self._policy, self._policy.interrupt, 0
        if interrupt is not None:
            sampled = self._sampled + sum(t.sampled for t in self._trajectories)
            point = interrupt.point(self._seed, self.turn, sampled)
        context = self._trajectories[self._at].token_ids.tolist() if self._waited else []
        pieces = await sample_reply(
            self._session,
            [*context, *chain.from_iterable(ids for ids, _ in self._pending)],
            policy.params,
            policy.renderer.stop_ids,
            room=room,
            interrupt=interrupt,
            point=point,
        )
        if context:
            pieces, self._waited = _without_routes(pieces, len(context) - 1), False  # the last id had none yet
        return pieces

    def _append_pending(self) -> Trajectory:
        """Append what the engine was given; return the trajectory, a new one after a fork."""
        if self._fork is not None:
            self._at = len(self._trajectories)
            self._trajectories.append(Trajectory(self._fork))
        trajectory = self._trajectories[self._at]
        for ids, source in self._pending:
            # a reply's closing tokens belong to its own turn, everything else opens the present one
            trajectory.append(ids, source, trajectory.last_turn if source is Source.TEMPLATE else self.turn)
        self._pending, self._fork = [], None
        return trajectory

    def _read(self, trajectory: Trajectory) -> Message:
        """Return what the last reply says; its calls get ids."""
        before, reply = trajectory.split_reply()
        message = self._policy.renderer.parse(reply, before, self._tools)
        if not message.tool_calls:
            return message
        named = ((f"call_{self.turn}_{i}", c) for i, c in enumerate(message.tool_calls))
        calls = tuple(ToolCall(id, c.name, c.arguments, c.error) for id, c in named)
        # not by dataclasses.replace: it takes 2.5 µs
        return Message("assistant", message.content, message.reasoning, calls)

    async def _summarise(self, max_tokens: int | None) -> int | None:
        """Let the policy say what replaces the context, in its present turn; return the room for its reply."""
        assert self._policy.shorten is not None
        self._asks = False
        length = self._length
        summary = await self.reply(max_tokens)
        if summary.finish_reason is FinishReason.ABORT:
            raise PolicyError("the policy aborted its summary")
        self.turn -= 1
        self._messages = self._policy.shorten.rewrite(self._messages[:-1], summary.message.content, self._examples)
        self._render(self._messages)
        return None if max_tokens is None else max_tokens + length - len(self._pending[0][0])

    def close(self) -> None:
        """Give the engine's slot back."""
        self._session.close()


def _replies_in(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _counted_from(prefix: Prefix | None, interrupt: Interruption | None, seed: int) -> tuple[int, int]:
    """Return the seed of an interruption's point, and how many tokens count as sampled before a conversation."""
    if prefix is None or interrupt is None or interrupt.per == "reply":
        return seed, 0
    if prefix.sampled is None:
        raise ConfigError(
            "interrupt.per=episode counts all that an episode sampled, and a continuation does not hold its parent's "
            "part: continue the parent, or set interrupt.per=reply"
        )
    return seed if prefix.seed is None else prefix.seed, prefix.sampled


def _without_routes(pieces: list[Piece], known: int) -> list[Piece]:
    """Leave out the routes of the first `known` positions, which were reported before; given ids may come first."""
    at, first = next((i, piece) for i, piece in enumerate(pieces) if isinstance(piece, Completion))
    if first.routed_experts is None:
        return pieces
    return [*pieces[:at], replace(first, routed_experts=first.routed_experts[known:]), *pieces[at + 1 :]]
