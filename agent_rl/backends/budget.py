"""Budget: what an episode may use, where a run wants another than the environment's own."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from agent_rl.config import Section
from agent_rl.env import Budget


class BudgetConfig(Section):
    """What `budget:` in a config holds; null leaves what the environment says."""

    turns: int | None = Field(None, ge=1)
    tokens: int | None = Field(None, ge=1)
    """Of the whole context."""
    tool_calls: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, gt=0)
    """By the clock: waiting for the policy counts, also while it gets new weights."""

    def instead_of(self, own: Budget) -> Budget:
        """Return an environment's budget with the limits that are set here in place of its own."""
        return replace(own, **self.model_dump(exclude_none=True))
