"""ModelUser: any policy in the place of a user, such as a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from agent_rl.core.messages import JSON, Message
from agent_rl.core.trajectory import FinishReason
from agent_rl.errors import ConfigError, UserError
from agent_rl.gym.cassette import cassette
from agent_rl.gym.registry import spec
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Conversation, EnvPolicy, Policy
from agent_rl.policy.by_name import PolicyConfig, open_policy, sampling_params


@dataclass(frozen=True, slots=True)
class ModelUser:
    """A user played by a policy; implements `User`. A user that can't answer fails the episode, which has no score."""

    policy: Policy
    instructions: str
    """The system message: who the user is, what they want and know, and when they say `stop`."""
    stop: str = "###STOP###"
    """What ends the dialogue, anywhere in a reply."""
    greeting: str = "Hi! How can I help you today?"
    """What the user hears before it speaks first, as chat templates need a message to answer."""
    seed: int = 0
    seconds: float | None = 120.0
    """For one reply. A budget's `seconds` count it as the environment's, but fail an episode that runs out on it."""

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Answer as the model does, in a conversation where the sides are swapped.

        Raises:
            UserError: if it fails, takes too long, or does not finish its reply.
        """
        async with self.answering():
            text = await self._sample(messages)
        return None if self.stop in text else text

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Hold what a reply takes to `seconds`; whatever fails in it is the user's failure.

        Raises:
            UserError: if it fails or takes too long.
        """
        try:
            async with asyncio.timeout(self.seconds) as clock:
                yield
        except UserError:
            raise
        except Exception as error:
            if clock.expired():
                raise UserError(f"the simulated user took more than {self.seconds:g} s for a reply") from error
            raise UserError(f"the simulated user could not answer: {type(error).__name__}: {error}") from error

    async def _sample(self, messages: Sequence[Message]) -> str:
        swapped = [Message("user" if m.role == "assistant" else "assistant", m.content) for m in messages]
        if not swapped or swapped[0].role == "assistant":
            swapped.insert(0, Message("user", self.greeting))
        conversation = self.policy.start((), self.seed + len(messages))
        try:
            length, limit = conversation.observe([Message("system", self.instructions), *swapped]), None
            if conversation.context_limit is not None:
                limit = conversation.context_limit - length
                if limit <= 0:
                    raise UserError(f"the dialogue's {length} tokens leave the simulated user no room for a reply")
            reply = await conversation.reply(limit)
        finally:
            conversation.close()
        if reply.finish_reason is not FinishReason.STOP:
            raise UserError(f"the simulated user's reply was cut ({reply.finish_reason}): raise its max_tokens")
        return reply.message.content


def model_user(name: str, settings: Mapping[str, JSON], instructions: str, env: str, seed: int = 0) -> ModelUser:
    """Return a user that plays by a policy's name and settings, as in `policy=NAME policy.key=value`.

    While an episode is verified, the policy is opened when it is first asked, if ever.

    Args:
        name: of a policy, or a checkpoint's folder.
        settings: of the policy; an event loop makes a policy once for the same ones.
        instructions: the user's system message.
        env: the id of the environment.
        seed: of what the user samples.

    Raises:
        ConfigError: if there is no such policy, or it is a script of the environment.
    """
    loop, given = asyncio.get_running_loop(), json.dumps(dict(settings), sort_keys=True)
    find = functools.partial(_policy_of, loop, name, given, env)
    is_asked = (recorded := cassette.get()) is None or recorded.goes_on
    return ModelUser(find() if is_asked else _Later(find), instructions, seed=seed)


@dataclass(frozen=True, slots=True)
class _Later:
    """A policy that a replay may never ask, so that its server may be gone; implements `Policy`."""

    find: Callable[[], Policy]

    def start(self, tools: Sequence[ToolSpec], seed: int) -> Conversation:
        """Begin, with the policy opened by now."""
        return self.find().start(tools, seed)


_opened: dict[tuple[int, asyncio.AbstractEventLoop], tuple[ExitStack, dict[tuple[str, str, str], Policy]]] = {}
"""The policies that are open, by the process and the event loop that they are of, as clients' connections are."""


def _policy_of(loop: asyncio.AbstractEventLoop, name: str, settings: str, env: str) -> Policy:
    """Return an event loop's policy, open until another asks after its end; each step of a run has a loop.

    Raises:
        ConfigError: as `model_user` does.
    """
    _close_policies(lambda each: each.is_closed())
    closing, policies = _opened.setdefault((os.getpid(), loop), (ExitStack(), {}))
    if (key := (name, settings, env)) not in policies:
        config = PolicyConfig.model_validate({"name": name, **json.loads(settings)})
        policy = closing.enter_context(open_policy(config, sampling_params(config), spec(env)))
        if isinstance(policy, EnvPolicy):
            raise ConfigError(f"user={name} plays the environment's own script: give a model, as policy= of a rollout")
        policies[key] = policy
    return policies[key]


def _close_policies(of: Callable[[asyncio.AbstractEventLoop], bool] = lambda loop: True) -> None:
    """Close this process's policies of some event loops; those from before a fork have no threads to close them."""
    for process, loop in list(_opened):
        if process == os.getpid() and of(loop) and (ended := _opened.pop((process, loop), None)):
            ended[0].close()


atexit.register(_close_policies)
