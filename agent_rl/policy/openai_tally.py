"""What one reply of an OpenAI-compatible server uses, counted as it grows."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from agent_rl.core.usage import Usage
from agent_rl.policy.openai_wire import ChatAnswer


@dataclass
class Tally:
    """The growing usage of one reply; it is there, too, if the reply fails or is cancelled."""

    model: str
    seed: int = 0
    """Of the pauses between attempts."""
    answers: list[ChatAnswer] = field(default_factory=list)
    uncounted: list[int] = field(default_factory=list)
    """Characters of each answer whose tokens the server did not say, nor that it failed: it may have charged them.

    Of one that did not come in time, those of a usual one."""
    finish_reason: str = ""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    waited: float = 0.0

    def usage(self) -> Usage:
        """Return what all attempts used so far, as far as their answers say it."""
        counts = [a.usage for a in self.answers if a.usage and a.usage.prompt_tokens is not None]
        return Usage(
            self.model,
            sum(c.prompt_tokens or 0 for c in counts) if counts else None,
            sum(c.completion_tokens or 0 for c in counts) if counts else None,
            sum(c.cached for c in counts),
            sum(c.reasoning for c in counts),
            self.finish_reason,
            tuple(self.errors),
            round(self.seconds, 4),
            round(self.waited, 4),
        )

    async def wait(self, seconds: float) -> None:
        """Wait, and count it."""
        if seconds > 0:
            started = time.monotonic()
            try:
                await asyncio.sleep(seconds)
            finally:
                self.waited += time.monotonic() - started
