"""Hermes-style replies as text: `<think>` a thought `</think>`, an answer, `<tool_call>` JSON `</tool_call>`."""

from __future__ import annotations

from agent_rl.core.messages import Message
from agent_rl.rendering.calls import CLOSE, OPEN, read_call

THINK, THINK_END = "<think>", "</think>"


def read_hermes(text: str) -> Message:
    """Read a decoded reply, without its end-of-turn token; what is malformed becomes a `ToolCall` with `error`."""
    reasoning, text = _split_thought(text)
    content, *bodies = text.split(OPEN)
    calls = []
    for index, body in enumerate(bodies):
        inside, closed, stray = body.partition(CLOSE)
        calls.append(read_call(inside, index, stray=stray, closed=bool(closed)))
    return Message("assistant", content.strip() if calls else content, reasoning=reasoning, tool_calls=tuple(calls))


def _split_thought(text: str) -> tuple[str | None, str]:
    if not text.lstrip().startswith(THINK):
        return None, text
    thought, _, answer = text.lstrip().removeprefix(THINK).partition(THINK_END)
    return thought.strip() or None, answer.lstrip("\n")
