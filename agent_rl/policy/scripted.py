"""Scripted policies: oracles, demonstrations, replays."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from agent_rl.core.messages import Message
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import PolicyError
from agent_rl.gym.env import Env, Script
from agent_rl.policy.base import Reply
from agent_rl.policy.by_name import register_policy
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering.base import Renderer
from agent_rl.seeds import Stream, rng

_WHOLE_REPLIES = SamplingParams(max_tokens=2**31)


@dataclass(frozen=True, slots=True)
class Scripted:
    """Plays `script(env, seed)`; implements `EnvPolicy`.

    With a renderer its episodes hold the token ids that a policy would have had to sample, without log-probabilities
    (NaN): behaviour cloning learns from them. A reply that exceeds the token budget is then cut, as a policy's is.
    """

    script: Callable[[Env, int], Script]
    renderer: Renderer | None = None

    def start_in(self, env: Env, seed: int) -> ScriptedConversation:
        """Begin an episode."""
        return ScriptedConversation(self, env, seed)


@register_policy("oracle")
def oracle(renderer: Renderer | None = None) -> Scripted:
    """Return the policy that plays each environment's own solution."""
    return Scripted(lambda env, seed: env.oracle(), renderer)


@register_policy("demonstrator")
def demonstrator(renderer: Renderer | None = None) -> Scripted:
    """Return the policy that plays each environment's own noisy demonstrations."""
    return Scripted(lambda env, seed: env.demonstrate(rng(Stream.DEMONSTRATION, seed)), renderer)


class ScriptedConversation:
    """One run of a script. The script starts with the first reply, after the environment's reset."""

    context_limit = None

    def __init__(self, policy: Scripted, env: Env, seed: int) -> None:
        self._observed: tuple[Message, ...] = ()
        self._answers = self._play(policy.script, env, seed)
        self._tokens = None
        if policy.renderer is not None:
            engine = ScriptedEngine(map(policy.renderer.reply, self._answers))
            self._tokens = TokenPolicy(engine, policy.renderer, _WHOLE_REPLIES).start(env.tools, seed)

    def _play(self, script: Callable[[Env, int], Script], env: Env, seed: int) -> Generator[Message]:
        played: object = script(env, seed)
        if not isinstance(played, Generator):
            name, kind = type(env).__name__, type(played).__name__
            raise TypeError(
                f"a script of {name}, such as its oracle, is a {kind}: write a plain `def` that yields its answers"
            )
        with closing(played) as answers:
            answer = next(answers, None)
            while answer is not None:
                if not isinstance(answer, str | Message):
                    raise TypeError(
                        f"a script yielded {reprlib.repr(answer)}: yield a str or ar.Message('assistant', ...)"
                    )
                yield Message("assistant", answer) if isinstance(answer, str) else answer
                try:
                    answer = answers.send(self._observed)
                except StopIteration:
                    answer = None
        raise PolicyError("the script ended before the episode did; let it yield one more answer")

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The token ids, if there is a renderer."""
        return self._tokens.trajectories if self._tokens else ()

    def observe(self, messages: Sequence[Message]) -> int:
        """Keep the observation for the script; return the context's length in tokens, 0 without a renderer."""
        self._observed = tuple(messages)
        return self._tokens.observe(messages) if self._tokens else 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Play the script up to its next answer.

        Raises:
            PolicyError: if the script has no further answer.
        """
        if self._tokens is not None:
            return await self._tokens.reply(max_tokens)
        return Reply(next(self._answers), FinishReason.STOP)

    def close(self) -> None:
        """End the script, so that its own clean-up runs."""
        if self._tokens is not None:
            self._tokens.close()
        self._answers.close()
