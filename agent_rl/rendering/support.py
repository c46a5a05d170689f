"""What a chat template renders itself, and how to write the rest into its messages, in the manner of Hermes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agent_rl.core.messages import Message
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.hermes import CLOSE, OPEN, THINK, THINK_END, spell_call

Reasoning = Literal["template", "content", "dropped"]
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within {}{} XML tags:
{}
{{"name": <function-name>, "arguments": <args-json-object>}}
{}"""
"""The words of Qwen 2.5's template, which is that of Hermes 2 Pro with the system's text in front."""


@dataclass(frozen=True, slots=True)
class Support:
    """Who renders what: the chat template, or we by what we write into its messages."""

    system: Literal["template", "user"] = "template"
    """A system message: `user` puts it in front of the first user message."""
    tools: Literal["template", "system"] = "template"
    """`system` describes them in the system message."""
    calls: Literal["template", "content"] = "template"
    """`content` writes them behind the content of the reply, as the description of the tools asks for."""
    results: Literal["template", "user"] = "template"
    """`user` makes user messages of them, each result between its tags."""
    reasoning: Reasoning = "template"
    """`content` writes `<think>` in front of the content; `dropped` if the template removes that, too."""

    @property
    def added(self) -> str:
        """What is written into the messages because the template leaves it out, in words; empty if nothing is."""
        parts = (
            (self.tools == "system", "tools into the system message (as Hermes does)"),
            (self.calls == "content", f"calls into the reply's text ({OPEN})"),
            (self.results == "user", f"results into user messages ({RESPONSE})"),
            (self.system == "user", "the system message into the first user message"),
        )
        return ", ".join(words for is_added, words in parts if is_added)

    def rewrite(self, messages: Sequence[Message], tools: Sequence[str]) -> list[Message]:
        """Return the messages as the template can render them.

        Args:
            messages: a conversation.
            tools: the schemas of its tools, as JSON; of no use where the template renders them.
        """
        own = _TOOLS.format("\n".join(tools), OPEN, CLOSE, OPEN, CLOSE) if tools and self.tools == "system" else ""
        has_system = bool(messages) and messages[0].role == "system"
        text = "\n\n".join(part for part in (messages[0].content if has_system else "", own) if part)
        out: list[Message] = []
        if self.system == "template" and (has_system or text):
            out, text = [Message("system", text)], ""
        is_result = False
        for message in messages[has_system:]:
            new = self._alone(message)
            if text and new.role == "user":
                new, text = replace(new, content=f"{text}\n\n{new.content}"), ""
            is_behind_result = is_result and new.role == "user"
            if is_behind_result:  # many templates want user and assistant to take turns
                new = replace(new, content=f"{out.pop().content}\n{new.content}")
            out.append(new)
            is_result = is_behind_result or (message.role == "tool" and new.role == "user")
        return [Message("user", text), *out] if text else out

    def _alone(self, message: Message) -> Message:
        """Return a message as the template can render it, whatever stands before it."""
        if message.role == "tool" and self.results == "user":
            return Message("user", f"{RESPONSE}\n{message.content}\n{RESPONSE_END}")
        if message.role != "assistant":
            return message
        content, reasoning, calls = message.content, message.reasoning, message.tool_calls
        if calls and self.calls == "content":
            content, calls = "\n".join(part for part in (content, *map(spell_call, calls)) if part), ()
        if reasoning and self.reasoning != "template":
            thought = f"{THINK}\n{reasoning}\n{THINK_END}\n\n" if self.reasoning == "content" else ""
            content, reasoning = thought + content, None
        return replace(message, content=content, reasoning=reasoning, tool_calls=calls)


def describe_additions(renderer: Renderer) -> str | None:
    """Return what a renderer writes into the messages because the chat template leaves it out; None if nothing."""
    support = getattr(renderer, "support", None)
    if not isinstance(support, Support) or not support.added:
        return None
    return (
        "the model's chat template does not render everything, or calls in a form that can't be read back, so that "
        f"agent_rl writes {support.added}"
    )
