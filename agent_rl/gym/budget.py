"""Budget: the limits of an episode, the environment's own or a run's."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from pydantic import Field

from agent_rl.config import Section
from agent_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one episode may use; None is "no limit". Running out truncates the episode."""

    turns: int | None = 16
    tokens: int | None = None
    """Token ids of the whole context: prompt, replies and everything that the environment said."""
    tool_calls: int | None = None
    seconds: float | None = None
    """That the environment takes, in `reset` and in all steps with their tools together, without the policy's replies.
    Running out of it in `reset` fails the episode."""
    score_seconds: float | None = 60.0
    """For all rewards together, after the episode; running out of it fails the episode."""
    close_seconds: float | None = 30.0
    """For `Env.close`; running out of it is a warning."""
    reply_seconds: float | None = None
    """For one reply of the policy, with its wait for the engine; running out of it fails the episode."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            is_time = limit.name.endswith("seconds")
            wanted = int | float if is_time else int
            fits = isinstance(value, wanted) and not isinstance(value, bool) and 0 < value < math.inf
            if value is not None and not fits:
                kind = "number" if is_time else "whole number"
                raise ConfigError(f"Budget({limit.name}={value!r}): give a positive {kind}, or None for no limit")


def overdue(what: str, seconds: float | None) -> TimeoutError:
    """Return the error of a part of an episode that ran out of its time."""
    return TimeoutError(f"{what} took more than the budget's {seconds:g} s")


class BudgetConfig(Section):
    """The section `budget:` of a config; null leaves the environment's own limit."""

    turns: int | None = Field(None, ge=1)
    """Replies of the policy."""
    tokens: int | None = Field(None, ge=1)
    """Of the whole context."""
    tool_calls: int | None = Field(None, ge=1)
    """Of the whole episode."""
    seconds: float | None = Field(None, gt=0)
    """That the environment takes, without the policy's replies."""
    score_seconds: float | None = Field(None, gt=0)
    """For all rewards together; an episode that runs out of it is not scored."""
    close_seconds: float | None = Field(None, gt=0)
    """For closing the environment; running out of it is a warning."""
    reply_seconds: float | None = Field(None, gt=0)
    """For one reply of the policy, with its wait for the engine; an episode that runs out of it is not scored."""

    def instead_of(self, own: Budget) -> Budget:
        """Return an environment's budget with the limits that are set here in place of its own."""
        return replace(own, **self.model_dump(exclude_none=True))
