"""Quiz: the common part of the built-in environments, questions with one exact answer."""

from __future__ import annotations

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step
from agent_rl.gym.env import Script, ToolEnv
from agent_rl.gym.reward import reward


class Quiz(ToolEnv):
    """A question with one exact answer, which `reset` sets; demonstrations fail in three ways."""

    answer: str
    failed = False
    """Whether a call has failed."""

    async def step(self, action: Message) -> Step:
        """Make the calls, and record whether one failed."""
        step = await super().step(action)
        self.failed = self.failed or any(message.tool_error for message in step.observation)
        return step

    @reward(weight=1.0)
    def correct(self, episode: Episode) -> bool:
        """Whether the final answer is the right one."""
        return episode.final_text.strip() == self.answer

    @reward(weight=0.1)
    def clean(self, episode: Episode) -> bool:
        """Whether there is an answer, and no call failed on the way to it."""
        return bool(episode.final_text) and not self.failed

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Guess, misname an argument or stop early now and then; else attempt the question."""
        mood = rng.random()
        if mood >= 0.26:
            yield from self.attempt(rng, stops_early=mood < 0.36)
            return
        if mood >= 0.20:
            yield self.misnamed_call()
        yield self.guess(rng)

    def guess(self, rng: np.random.Generator) -> str:
        """Return an answer at random."""
        raise NotImplementedError(f"{type(self).__name__} has to define guess(self, rng)")

    def misnamed_call(self) -> Message:
        """Return a call whose argument has a wrong name."""
        raise NotImplementedError(f"{type(self).__name__} has to define misnamed_call(self)")

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Play with the right form, but with mistakes."""
        raise NotImplementedError(f"{type(self).__name__} has to define attempt(self, rng, *, stops_early)")
