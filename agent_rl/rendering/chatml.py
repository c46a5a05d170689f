"""Compact ChatML for the embedded model: a tool costs one line, a turn costs three tokens of frame.

    <|im_start|>system
    calculator(expression)<|im_end|>
    <|im_start|>user
    What is 3*4?<|im_end|>
    <|im_start|>assistant
    <tool_call>{"name":"calculator","arguments":{"expression":"3*4"}}</tool_call><|im_end|>
    <|im_start|>tool
    12<|im_end|>
    <|im_start|>assistant

Frames are put together from token ids and all else is encoded as plain text, so that no message can forge a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from agent_rl.core.messages import Message, Role
from agent_rl.errors import RenderError
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering.base import Bridge
from agent_rl.rendering.by_name import register_renderer
from agent_rl.rendering.chat_format import as_unicode, require_text
from agent_rl.rendering.hermes import CLOSE, OPEN, read_call, read_hermes, write_call
from agent_rl.rendering.tokenizer import END_OF_TEXT, IM_END, IM_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@register_renderer("chatml")
class ChatMLRenderer:
    """Renders the format above; a bridge costs what its messages cost, however long the episode is."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Take a tokenizer from `train_tokenizer`, or one that has the tokens of ChatML.

        One that has no tokens for the tags of a call, such as SmolLM2's, gets them as text: a reply is then read by its
        text, as other Hermes formats are.

        Raises:
            RenderError: if the tokenizer lacks one of ChatML's special tokens.
        """
        self._tokenizer = tokenizer.backend_tokenizer
        self._plain = _without_added_tokens(self._tokenizer)
        start, self._end, end_of_text = (self._special(token) for token in (IM_START, IM_END, END_OF_TEXT))
        tags = [self._tokenizer.token_to_id(tag) for tag in (OPEN, CLOSE)]
        self._tags: list[int] | None = None if None in tags else tags
        self._open, self._close = ([t] for t in self._tags) if self._tags else (self._text(OPEN), self._text(CLOSE))
        self.stop_ids = frozenset({self._end, end_of_text})
        self._newline = self._text("\n")
        self._headers = {role: [start, *self._text(f"{role}\n")] for role in _ROLES}
        self._turn_end = [self._end, *self._newline]
        self._closed = tuple(self._newline)
        self._cut_off = tuple(self._turn_end)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Render the whole conversation up to the header of the policy's reply."""
        ids: list[int] = []
        if tools:
            lines = [_signature(tool) for tool in tools]
            if messages and messages[0].role == "system":
                lines.append(messages[0].content)
                messages = messages[1:]
            ids += self._headers["system"] + self._text("\n".join(lines)) + self._turn_end
        return ids + self._turns(messages)

    def bridge(
        self, prefix: Sequence[int], reply: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> Bridge:
        """Render the new messages; always an append, because turns are encoded one by one."""
        closed = bool(reply) and reply[-1] == self._end
        return Bridge(self._closed if closed else self._cut_off, tuple(self._turns(messages)))

    def parse(self, reply: Sequence[int], prefix: Sequence[int] = (), tools: Sequence[ToolSpec] = ()) -> Message:
        """Read a reply by its token ids; text that only looks like a tag is text."""
        stop = next((at for at, token in enumerate(reply) if token in self.stop_ids), len(reply))
        if self._tags is None:
            return read_hermes(self._decode(reply[:stop]))
        opening, closing = self._tags
        content, *bodies = _split(reply[:stop], opening)
        calls = []
        for index, body in enumerate(bodies):
            at = body.index(closing) if closing in body else None
            inside, stray = (body, []) if at is None else (body[:at], body[at + 1 :])
            calls.append(read_call(self._decode(inside), index, stray=self._decode(stray), closed=at is not None))
        return Message("assistant", self._decode(content), tool_calls=tuple(calls))

    def reply(self, message: Message) -> list[int]:
        """Render an assistant message as a policy would have sampled it, up to its `<|im_end|>`.

        Raises:
            RenderError: if the message has reasoning, for which this format has no place.
        """
        if message.reasoning:
            raise RenderError(f"ChatML has no place for reasoning, got {message.reasoning!r}: put it into `content`")
        ids = self._text(message.content)
        for call in message.tool_calls:
            ids += [*self._open, *self._text(write_call(call)), *self._close]
        return [*ids, self._end]

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        require_text(messages)
        ids: list[int] = []
        for message in messages:
            ids += self._headers[message.role]
            if message.role == "assistant":
                ids += self.reply(message) + self._newline
            else:
                ids += self._text(message.content) + self._turn_end
        return ids + self._headers["assistant"]

    def _text(self, text: str) -> list[int]:
        """Encode plain text: no special token can come out."""
        return list(self._plain.encode(as_unicode(text), add_special_tokens=False).ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""

    def _special(self, token: str) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise RenderError(f"the tokenizer has no token {token!r}: train it with train_tokenizer, or add the token")
        return found


def _signature(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties")
    return f"{tool.name}({','.join(properties) if isinstance(properties, Mapping) else ''})"


def _split(ids: Sequence[int], separator: int) -> list[list[int]]:
    places = [at for at, token in enumerate(ids) if token == separator]
    return [list(ids[before + 1 : at]) for before, at in pairwise((-1, *places, len(ids)))]


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    from tokenizers import Tokenizer

    plain = {**json.loads(tokenizer.to_str()), "added_tokens": [], "post_processor": None}
    return Tokenizer.from_str(json.dumps(plain))
