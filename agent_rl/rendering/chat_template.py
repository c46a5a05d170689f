"""A tokenizer's chat template: messages to token ids, and the ids that close a reply or follow it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agent_rl.core.messages import JSON, Message, ToolCall
from agent_rl.core.sequences import shared_start
from agent_rl.errors import RenderError
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering.chat_format import message_dict, require_text, tool_dicts
from agent_rl.rendering.masks import Masks
from agent_rl.rendering.support import Support

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELLO = Message("user", "Hello")
THOUGHT = "Let me see."
SAID = Message("assistant", "x", reasoning=THOUGHT)
AGAIN = Message("user", "And then?")


class BreakError(RenderError):
    """The template did not append."""


class ChatTemplate:
    """Renders what `support` says that the template renders, and writes the rest into its messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, JSON] | None = None) -> None:
        """Find what closes a reply; `options` are further variables of the template, such as `enable_thinking`.

        Raises:
            RenderError: if there is no template, or it has no end of turn.
        """
        if not tokenizer.chat_template:
            raise RenderError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template, as base models have none: set "
                "renderer=plain, or start from the model's instruct version"
            )
        self._tokenizer, self.options = tokenizer, dict(options or {})
        self._masks = Masks(tokenizer)
        self.support = Support()
        self._final: tuple[int, ...] = ()
        self._final = self._find_final()
        self.close = self._find_close()
        """What the template puts behind a reply: from its end-of-turn token on."""
        eos: int | None = tokenizer.eos_token_id
        self.stop_ids = frozenset({self.close[0]} | ({eos} if eos is not None else set()))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> list[int]:
        """Render and encode; special tokens in the environment's messages are encoded as plain text."""
        from jinja2 import TemplateError

        require_text(messages)
        described = [self._masks.hide(json.dumps(tool.openai(), ensure_ascii=False)) for tool in tools]
        # an assistant's text keeps them, as it may hold tags that the template looks for
        masked = [m if m.role == "assistant" else replace(m, content=self._masks.hide(m.content)) for m in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [message_dict(m) for m in self.support.rewrite(masked, described)],
                tools=self._masks.hide_within(tool_dicts(tools)) if self.support.tools == "template" else None,
                add_generation_prompt=generate,
                tokenize=False,
                **self.options,
            )
        except (TemplateError, TypeError, LookupError) as error:
            roles = ", ".join(m.role for m in messages)
            raise RenderError(f"the chat template does not render a conversation of {roles}: {error}") from error
        ids = self._masks.encode(text)
        if self._final and not generate and tuple(ids[-len(self._final) :]) == self._final:
            del ids[-len(self._final) :]
        return ids

    def reply(self, message: Message) -> list[int]:
        """Render an assistant message as a policy would have sampled it, stop id included."""
        header, whole = self.render([HELLO], (), generate=True), self.render([HELLO, message], (), generate=False)
        self.require_prefix(header, whole, "a reply")
        return whole[len(header) : len(whole) - len(self.close) + 1]

    def tail(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the ids of the messages and the next header, as they follow a closed reply."""
        name = tools[0].name if tools else "look"
        tools = tools if self.support.tools == "template" else ()  # the system message is not in the tail
        calls = tuple(ToolCall(m.tool_call_id or "call00000", m.name or name) for m in messages if m.role == "tool")
        thought = THOUGHT if self.support.reasoning == "template" else None  # templates keep no empty ones
        dummy = [HELLO, Message("assistant", "x", reasoning=thought, tool_calls=calls)]
        before = self.render(dummy, tools, generate=False)
        after = self.render([*dummy, *messages], tools, generate=True)
        self.require_prefix(before, after, f"a {kind_of(messages)} message")
        if tuple(before[-len(self.close) :]) != self.close:
            raise BreakError(f"the chat template closes a reply with tool calls as {self.decode(before[-8:])!r}")
        return after[len(before) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included, and spaces in front of commas."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def require_prefix(self, before: Sequence[int], after: Sequence[int], what: str) -> None:
        """Raise `BreakError` unless `before` begins `after`; `what` is rendered in between."""
        at = shared_start(before, after)
        if at < len(before):
            around = slice(max(0, at - 8), at + 8)
            raise BreakError(
                f"the chat template rewrites what came before {what}: token {at} of {len(before)} starts to differ, "
                f"{self.decode(before[around])!r} became {self.decode(after[around])!r}"
            )

    def ends_among(self, ids: frozenset[int]) -> frozenset[int]:
        """Return those ids that can end a reply: special tokens that the template puts into none, before its close."""
        header, whole = self.render([HELLO], (), generate=True), self.render([HELLO, SAID], (), generate=False)
        return (ids & self._masks.special_ids) - {*whole[shared_start(header, whole) : len(whole) - len(self.close)]}

    def _find_final(self) -> tuple[int, ...]:
        """Return what the template puts behind a conversation as a whole, and no more once it goes on: Phi-3's eos."""
        history = [HELLO, Message("assistant", "x")]
        alone = self.render(history, (), generate=False)
        continued = self.render([*history, AGAIN], (), generate=True)
        behind = tuple(alone[shared_start(alone, continued) :])
        return behind if set(behind) <= {self._tokenizer.eos_token_id} else ()

    def _find_close(self) -> tuple[int, ...]:
        """Return what the template puts behind a reply: from its end-of-turn token on."""
        one, two = (self.render([HELLO, Message("assistant", text)], (), generate=False) for text in ("x", "7"))
        suffix = one[len(one) - shared_start(one[::-1], two[::-1]) :]
        start = next((at for at, token in enumerate(suffix) if token in self._masks.special_ids), None)
        if start is None:
            raise RenderError(
                f"no special token ends the turn in the chat template, which closes a reply with "
                f"{self.decode(suffix)!r}: nothing tells where to stop sampling, add one"
            )
        return tuple(suffix[start:])


def kind_of(messages: Sequence[Message]) -> str:
    """Return `tool` for results of tools, `user` for all else that follows a reply."""
    return "tool" if messages and all(m.role == "tool" for m in messages) else "user"
