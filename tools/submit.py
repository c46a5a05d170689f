"""Submit an answer by a call, which ends the episode: an argument is easier to grade than prose."""

from __future__ import annotations

from typing import Protocol

from agent_rl.gym.tool import tool


class HasSubmission(Protocol):
    """An environment that keeps the answer, for its rewards to read: `submitted: str | None = None`."""

    submitted: str | None


@tool(inline=True, ends=True)
def submit(self: HasSubmission, answer: str) -> str:
    """Submit the final answer and end the task. Only the first answer counts.

    Args:
        answer: the answer alone.
    """
    if self.submitted is not None:
        raise ValueError("an answer was submitted already")
    self.submitted = answer
    return "submitted"
