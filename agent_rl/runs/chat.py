"""A person talks to a policy, which may use an environment's tools; the person plays the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from numpy.random import Generator

from agent_rl.concurrency import CallingThread
from agent_rl.core.episode import Episode, Origin, Reward, StopReason
from agent_rl.core.messages import Message, Step, Task
from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import InferenceEngine, SamplingParams, Session
from agent_rl.engines.resuming import joined
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, messages_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import TaskSource
from agent_rl.policy.base import AnyPolicy, Conversation, FullContextError, Reply
from agent_rl.policy.human import QuitError
from agent_rl.policy.openai_failures import ContextOverflowError
from agent_rl.rollout.episode import EpisodeRun
from agent_rl.rollout.job import Job

CHUNK = 4
"""Tokens that are sampled between two looks at what is new."""


class ResetError(Exception):
    """The person wants to begin anew."""


class Alone(Env):
    """No environment: nothing but what the person says."""

    def reset(self, task: Task, rng: Generator) -> tuple[Message, ...]:
        """Say nothing."""
        return ()

    def step(self, action: Message) -> Step:
        """Say nothing; there are no tools to call."""
        return Step()


ALONE = EnvSpec("", "chat", 0, Alone, TaskSource({"train": [{}], "eval": [{}]}), Budget())


@dataclass(slots=True)
class StreamingEngine:
    """Implements `InferenceEngine` in front of one that continues a sequence where its last sample was cut.

    Setting `stopped` ends the reply under way as a limit of tokens would.
    """

    engine: InferenceEngine
    on_tokens: Callable[[Sequence[int], Sequence[int]], object]
    """Called with all ids before the reply, and those of the reply so far."""
    stopped: bool = False

    @property
    def context_limit(self) -> int | None:
        """The longest sequence, in tokens."""
        return self.engine.context_limit

    def open(self, seed: int) -> StreamingSession:
        """Begin a sequence."""
        return StreamingSession(self, self.engine.open(seed))


class StreamingSession:
    """One sequence, sampled a few tokens at a time: the ids and log-probabilities are those of one piece."""

    def __init__(self, engine: StreamingEngine, session: Session) -> None:
        self._engine, self._session, self._before = engine, session, list[int]()

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` and sample until the reply ends, or is stopped."""
        engine, limit, pieces = self._engine, self._engine.context_limit, list[Completion]()
        self._before += ids
        reply, left = list[int](), params.max_tokens
        while True:
            piece = await self._session.sample(ids, replace(params, max_tokens=min(CHUNK, left)), stop_ids)
            pieces.append(piece)
            left -= len(piece.token_ids)
            reply += piece.token_ids
            engine.on_tokens(self._before, reply)
            is_full = left < 1 or (limit is not None and len(self._before) + len(reply) >= limit)
            if piece.finish_reason is not FinishReason.LENGTH or is_full or engine.stopped:
                self._before += reply
                return joined(pieces)
            ids = ()

    def close(self) -> None:
        """Forget the sequence."""
        self._session.close()


@dataclass(frozen=True, slots=True)
class Terminal:
    """How the person sees and says things; called in their thread."""

    ask: Callable[[], str]
    """May raise `QuitError` and `ResetError`."""
    show: Callable[[Message], object]
    """Shows a message of the policy, or of a tool."""
    say: Callable[[str], object]
    replied: Callable[[Conversation], object]
    """Called after each reply."""


class ChatRun(EpisodeRun):
    """One conversation under way; its record is an episode without a score."""

    left: QuitError | ResetError | None = None
    refused: tuple[Message, ...] = ()
    """Answers to calls that did not run: servers and templates take no call without one."""

    def __init__(self, job: Job, policy: AnyPolicy, terminal: Terminal, thread: CallingThread) -> None:
        super().__init__(job, policy)
        self.terminal, self.thread = terminal, thread

    async def interact(self, env: Env) -> StopReason:
        """Let the person and the policy take turns, until the person leaves or the context is full."""
        observation = tuple(m for m in await self.reset(env) if m.role == "system")  # the task is the person's to give
        self.clock.stage = "policy"
        self.conversation = conversation = self.start(env)
        limit = conversation.context_limit
        while True:
            try:
                text = await self.thread.call(self.terminal.ask)
            except (QuitError, ResetError) as left:
                self.left = left
                return StopReason.TURNS
            if self.replies > len(self.steps):
                self.record(len(self.refused) + 1, 0.0, terminated=False, truncated=False)
            observation += (*self.refused, Message("user", text))
            self.refused = ()
            while observation:
                self.messages += observation
                length = conversation.observe(observation)
                if limit is not None and length >= limit:
                    return StopReason.TOKENS
                observation = await self.answer(env, conversation, None if limit is None else limit - length)

    async def reply(self, conversation: Conversation, most: int | None) -> Reply:
        """Ask the policy; a first message that its server finds too long fills the context as a later one does."""
        try:
            return await self.clock.reply(conversation, most)
        except ContextOverflowError:
            raise FullContextError from None

    async def answer(self, env: Env, conversation: Conversation, room: int | None) -> tuple[Message, ...]:
        """Have the policy reply and its tools run; return what these said, nothing if it is the person's turn."""
        self.clock.stage = "policy"
        reply = await self.reply(conversation, room)
        self.messages.append(reply.message)
        self.replies += 1
        await self.thread.call(lambda: self.terminal.show(reply.message))
        await self.thread.call(lambda: self.terminal.replied(conversation))
        if (is_cut := reply.finish_reason is not FinishReason.STOP) or not env.tools:
            why = "error: the reply was cut, so that the call did not run" if is_cut else "error: there are no tools"
            self.refused = tuple(Message("tool", why, tool_call_id=c.id, name=c.name) for c in reply.message.tool_calls)
        if is_cut or not env.tools or not reply.message.tool_calls:
            return ()
        step = await self.clock.step(env, reply.message)
        said = messages_of(step.observation)
        self.record(len(said), float(step.reward), step.terminated, step.truncated)
        for message in said:
            await self.thread.call(lambda message=message: self.terminal.show(message))  # type: ignore[misc]
        return said


def chat(job: Job, policy: AnyPolicy, terminal: Terminal) -> tuple[Episode, bool]:
    """Hold one conversation in this thread; return it as an episode, and whether the person quit.

    An interrupt or a signal to quit amid a reply ends it, too: what was said before it is the conversation.
    """
    thread = CallingThread()
    run = ChatRun(job, policy, terminal, thread)
    try:
        episode = thread.serve(run.play(scored=False))
    except (KeyboardInterrupt, QuitError):
        run.left, episode = QuitError(), run.ended_by(StopReason.TURNS)
    unscored = (Reward("chat", None, source="person"),)  # none at all would be 0
    return replace(episode, rewards=unscored), isinstance(run.left, QuitError)


def chat_job(env: EnvSpec, env_args: dict[str, object], split: str, task: int, seed: int) -> Job:
    """Return the job of a conversation in the world of one of an environment's tasks."""
    chosen = env.tasks.stream(split).at(task)
    return Job(env, chosen, seed, env_args=env_args, origin=Origin("rollout", split))  # type: ignore[arg-type]
