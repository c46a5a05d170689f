"""Scripted: a policy that plays a script; for oracles, demonstrations and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.errors import PolicyError
from agent_rl.gym.env import Script
from agent_rl.policy.base import Opening, Reply
from agent_rl.rendering.base import Renderer


@dataclass(frozen=True, slots=True)
class Scripted:
    """Plays `script(opening)`; implements `Policy`.

    With a renderer its episodes hold the token ids that a policy would have had to sample, without
    log-probabilities (NaN): what behaviour cloning learns from.
    """

    script: Callable[[Opening], Script]
    renderer: Renderer | None = None

    def start(self, opening: Opening) -> ScriptedConversation:
        """Begin an episode."""
        return ScriptedConversation(self.script, self.renderer, opening)


def oracle(renderer: Renderer | None = None) -> Scripted:
    """Return the policy that plays each environment's own solution."""
    return Scripted(lambda opening: opening.env.oracle(), renderer)


def demonstrator(renderer: Renderer | None = None) -> Scripted:
    """Return the policy that plays each environment's own noisy demonstrations."""
    return Scripted(lambda opening: opening.env.demonstrate(np.random.default_rng([1, opening.seed])), renderer)


class ScriptedConversation:
    """One run of a script. The script starts with the first reply, after the environment's reset."""

    context_limit = None

    def __init__(self, script: Callable[[Opening], Script], renderer: Renderer | None, opening: Opening) -> None:
        self._make, self._opening, self._renderer = script, opening, renderer
        self._script: Script | None = None
        self._observed: tuple[Message, ...] = ()
        self._trajectory = Trajectory()
        self._ids: list[int] = []
        self._reply: list[int] = []
        self._turn = 0

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The token ids, if there is a renderer."""
        return (self._trajectory,) if self._renderer else ()

    def observe(self, messages: Sequence[Message]) -> int:
        """Take note of what the environment said."""
        self._observed = tuple(messages)
        if self._renderer is not None:
            self._append(self._renderer)
        return len(self._trajectory)

    def _append(self, renderer: Renderer) -> None:
        if not self._reply:
            self._ids = renderer.prompt(self._observed, self._opening.tools)
            self._trajectory.append(self._ids, Source.PROMPT, self._turn)
            return
        bridge = renderer.bridge(self._ids, self._reply, self._observed, self._opening.tools)
        if bridge is None:
            raise PolicyError("this renderer can't append to a scripted reply; use one that can, or none")
        self._trajectory.append(bridge.closing, Source.TEMPLATE, self._turn - 1)
        self._trajectory.append(bridge.ids, Source.ENV, self._turn)
        self._ids += [*self._reply, *bridge.closing, *bridge.ids]

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Play the script up to its next answer.

        Raises:
            PolicyError: if the script is at its end.
        """
        try:
            if self._script is None:
                self._script = self._make(self._opening)
                answer = next(self._script)
            else:
                answer = self._script.send(self._observed)
        except StopIteration:
            raise PolicyError("the script ended before the episode did; let it yield one more answer") from None
        message = Message("assistant", answer) if isinstance(answer, str) else answer
        if self._renderer is not None:
            self._reply = self._renderer.reply(message)
            n = len(self._reply)
            unknown = (float("nan"),) * n
            completion = Completion(tuple(self._reply), unknown, unknown, FinishReason.STOP, (0,) * n)
            self._trajectory.append_completion(completion, self._turn)
        self._turn += 1
        return Reply(message, FinishReason.STOP)

    def close(self) -> None:
        """End the script, so that its own clean-up runs."""
        if self._script is not None:
            self._script.close()
