"""A bridge for any chat template that only appends: proven on token ids, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Literal

from agent_rl.core.messages import JSON, Message, ToolCall
from agent_rl.errors import ConfigError, RenderError
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering.base import Bridge
from agent_rl.rendering.by_name import register_renderer
from agent_rl.rendering.chat_format import message_dict, require_text, tool_dicts
from agent_rl.rendering.hermes import THINK, THINK_END, read_hermes
from agent_rl.rendering.support import Reasoning, Support

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnBreak = Literal["refuse", "fork"]
Missing = Literal["system", "refuse"]
_MASK = 0x100000  # the last private plane of Unicode: one character for each special token

_HELLO = Message("user", "Hello")
_SYSTEM = Message("system", "Be Dromvik.")
_THOUGHT = "Let me see."
_ANSWER = Message("assistant", "It is 7.", reasoning=_THOUGHT)
_LOOK = ToolCall("call_0", "look", {"at": "sky", "far": True, "count": 7, "unit": None, "note": 'é "quoted"'})
_CALL = Message("assistant", "I look.", reasoning=_THOUGHT, tool_calls=(_LOOK,))
_TWO_CALLS = Message("assistant", "I look.", tool_calls=(_LOOK, ToolCall("call_1", "wait")))
_RESULT = Message("tool", "blue as ever", tool_call_id="call_0", name="look")
_AGAIN = Message("user", "And then?")
_WORDS = ("quorvex", "Brimdal", "plenza", "Vostrik")
"""That no template has: a tool's name and description, its argument's name and description."""
_TOOL = ToolSpec(
    _WORDS[0],
    f"The {_WORDS[1]} way.",
    {"type": "object", "properties": {_WORDS[2]: {"type": "string", "description": f"Any {_WORDS[3]}."}}},
)
_PROBES: tuple[tuple[tuple[Message, ...], Message], ...] = (
    ((_HELLO, _ANSWER), _AGAIN),
    ((_HELLO, _CALL), _RESULT),
    ((_HELLO, _CALL, _RESULT, _CALL), _RESULT),
    ((_HELLO, _CALL, _RESULT, _ANSWER), _AGAIN),
)


class _BreakError(RenderError):
    """The template did not append."""


@register_renderer("template")
class TemplateRenderer:
    """Renders with the tokenizer's own chat template and bridges by the difference of two short renderings.

    At construction a tool, a call, its result and a thought of words that no template has are rendered: what does not
    come out, or can't be read back, is written into the messages, see `support`. Then fixed conversations (with a
    thought, a tool call, its result, a second question) are rendered with and without the next message: the shorter
    one's ids must be a prefix of the longer one's, and what follows must not depend on the history. Then
    `[dummy question, dummy reply] + new messages` gives the ids to append, and its own prefix is checked each time.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: Callable[[str], Message] = read_hermes,
        on_break: OnBreak = "refuse",
        missing: Missing = "system",
        options: Mapping[str, JSON] | None = None,
    ) -> None:
        """Prove the template.

        Args:
            tokenizer: one with a chat template.
            parser: reads a decoded reply without its stop token.
            on_break: what to do about a template that rewrites the past: "refuse" raises, "fork" lets `bridge` answer
                None for the kind of message that it happens with.
            missing: what to do about a template that leaves out tools, calls or results: "system" writes them into the
                system message and the others' text, "refuse" raises.
            options: further variables of the template, such as `enable_thinking`.

        Raises:
            RenderError: if there is no template, or it has no end of turn, or it rewrites what it rendered before, or
                leaves out what `missing` refuses.
        """
        if on_break not in ("refuse", "fork"):
            raise ConfigError(f"on_break={on_break!r}: take 'refuse' or 'fork'")
        if missing not in ("system", "refuse"):
            raise ConfigError(f"missing={missing!r}: take 'system' or 'refuse'")
        if not tokenizer.chat_template:
            raise RenderError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template, as base models have none: set "
                "renderer=plain, or start from the model's instruct version"
            )
        self._tokenizer, self._parser, self._on_break = tokenizer, parser, on_break
        self._options = dict(options or {})
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = frozenset(special)
        self._masks = {token: chr(_MASK + index) for index, token in enumerate(special.values())}
        self.support = Support()
        self._final: tuple[int, ...] = ()
        self._final = self._find_final()
        self._close = self._find_close()
        eos: int | None = tokenizer.eos_token_id
        self.stop_ids = frozenset({self._close[0]} | ({eos} if eos is not None else set()))
        self._broken: set[str] = set()
        self._find_support()
        if missing == "refuse" and self.support.added:
            raise RenderError(
                f"the chat template leaves out what renderer.missing=system would write: {self.support.added}"
            )
        for history, new in _PROBES:
            self._try(history, new)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Render the whole conversation up to the header of the policy's reply."""
        return self._render(messages, tools, generate=True)

    def bridge(
        self, prefix: Sequence[int], reply: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> Bridge | None:
        """Render the ids behind the reply; None (with `on_break="fork"`) if the template would rewrite it."""
        if _kind(messages) in self._broken:
            return None
        try:
            tail = self._tail(messages, tools)
        except _BreakError:
            if self._on_break == "fork":
                return None
            raise
        closed = bool(reply) and reply[-1] == self._close[0]
        return Bridge(self._close[1:] if closed else self._close, tuple(tail))

    def parse(self, reply: Sequence[int], prefix: Sequence[int] = (), tools: Sequence[ToolSpec] = ()) -> Message:
        """Decode a sampled reply and hand it to the parser, with the `<think>` that its prompt may have opened."""
        stop = next((at for at, token in enumerate(reply) if token in self.stop_ids), len(reply))
        opened = self._decode(prefix[-8:]).rstrip().endswith(THINK)
        return self._parser((THINK if opened else "") + self._decode(reply[:stop]))

    def reply(self, message: Message) -> list[int]:
        """Render an assistant message as a policy would have sampled it, stop id included."""
        header, whole = self._render([_HELLO], (), generate=True), self._render([_HELLO, message], (), generate=False)
        self._require_prefix(header, whole, "a reply")
        return whole[len(header) : len(whole) - len(self._close) + 1]

    def _try(self, history: Sequence[Message], new: Message) -> None:
        try:
            self._prove(history, new)
        except _BreakError as error:
            if self._on_break == "refuse":
                raise RenderError(
                    f"{error}. Accept a fork at such turns with renderer=template-fork, or name the model's family if "
                    f"`renderers` has it, such as renderer=qwen3"
                ) from error
            self._broken.add(new.role)

    def _find_support(self) -> None:
        """Find what the template renders, and read it back; leave the rest to `support`."""
        if not self._comes_out([_SYSTEM, _HELLO], (), _SYSTEM.content):
            self.support = replace(self.support, system="user")
        if not (self._comes_out([_HELLO], [_TOOL], *_WORDS) and self._comes_out([_SYSTEM, _HELLO], [_TOOL], *_WORDS)):
            self.support = replace(self.support, tools="system")
        problem = self._choose_reasoning() or self._choose_calls()
        if problem is not None and (self._on_break == "refuse" or not isinstance(problem, _BreakError)):
            raise problem
        if not self._takes_results():
            self.support = replace(self.support, results="user")

    def _choose_reasoning(self) -> RenderError | None:
        choices: tuple[tuple[Reasoning, str | None], ...]
        choices = (("template", _THOUGHT), ("content", _THOUGHT), ("dropped", None))
        for choice, thought in choices:
            self.support = replace(self.support, reasoning=choice)
            problem = self._why_not_read(replace(_TWO_CALLS, reasoning=thought, tool_calls=()))
            if problem is None:
                break
        return problem

    def _choose_calls(self) -> RenderError | None:
        thought = None if self.support.reasoning == "dropped" else _THOUGHT
        problem = self._why_not_read(replace(_TWO_CALLS, reasoning=thought))
        if problem is not None:  # the description of the tools says how to write a call, so that is ours, too
            self.support = replace(self.support, tools="system", calls="content")
            problem = self._why_not_read(replace(_TWO_CALLS, reasoning=thought))
        return problem

    def _comes_out(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *words: str) -> bool:
        try:
            rendered = self._decode(self._render(messages, tools, generate=True))
        except RenderError:
            return False
        return all(word in rendered for word in words)

    def _why_not_read(self, message: Message) -> RenderError | None:
        """Return why a reply is not parsed as what was rendered; the ids of calls are the parser's own."""
        try:
            ids = self.reply(message)
            read = self.parse(ids, self._render([_HELLO], (), generate=True))
        except RenderError as error:
            return error
        calls, expected = ([(c.name, dict(c.arguments), c.error) for c in m.tool_calls] for m in (read, message))
        if (read.content.strip(), read.reasoning, calls) == (message.content, message.reasoning, expected):
            return None
        return RenderError(f"the chat template changes the reply: {message.content!r} becomes {self._decode(ids)!r}")

    def _takes_results(self) -> bool:
        """Return whether a result comes out, and as nobody else's words."""
        history = [_HELLO, _TWO_CALLS]
        results = [_RESULT, replace(_RESULT, content="gone by", tool_call_id="call_1", name="wait")]
        if not self._comes_out([*history, *results], (), *(m.content for m in results)):
            return False
        shown = self._render([*history, _RESULT], (), generate=True)
        for role in ("user", "assistant"):
            try:
                if shown == self._render([*history, Message(role, _RESULT.content)], (), generate=True):
                    return False
            except RenderError:  # turns that don't alternate
                continue
        if self.support.calls == "template":
            return True
        try:  # a template's results may need its calls
            for probe in _PROBES:
                if probe[1].role == "tool":
                    self._prove(*probe)
        except RenderError:
            return False
        return True

    def _prove(self, history: Sequence[Message], new: Message) -> None:
        header = self._render(history[:-1], (), generate=True)
        if self.support.reasoning == "dropped" and not self._decode(header).rstrip().endswith(THINK_END):
            raise _BreakError(f"the chat template changes the reply: it leaves out the thought {_THOUGHT!r}")
        before = self._render(history, (), generate=False)
        after = self._render([*history, new], (), generate=True)
        self._require_prefix(header, before, "a reply")
        if history[-1].content not in self._decode(before):
            shown = self._decode(before[len(header) :])
            raise _BreakError(f"the chat template changes the reply {history[-1].content!r} to {shown!r}")
        self._require_prefix(before, after, f"a {new.role} message")
        tail = self._tail([new], ())
        if after[len(before) :] != tail or new.content not in self._decode(tail):
            raise _BreakError(
                f"the chat template renders the {new.role} message {new.content!r} as "
                f"{self._decode(after[len(before) :])!r} or {self._decode(tail)!r}, depending on what came before"
            )

    def _tail(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the ids of the messages and the next header, as they follow a closed reply."""
        name = tools[0].name if tools else "look"
        tools = tools if self.support.tools == "template" else ()  # the system message is not in the tail
        calls = tuple(ToolCall(m.tool_call_id or "call00000", m.name or name) for m in messages if m.role == "tool")
        thought = _THOUGHT if self.support.reasoning == "template" else None  # templates keep no empty ones
        dummy = [_HELLO, Message("assistant", "x", reasoning=thought, tool_calls=calls)]
        before = self._render(dummy, tools, generate=False)
        after = self._render([*dummy, *messages], tools, generate=True)
        self._require_prefix(before, after, f"a {_kind(messages)} message")
        if tuple(before[-len(self._close) :]) != self._close:
            raise _BreakError(f"the chat template closes a reply with tool calls as {self._decode(before[-8:])!r}")
        return after[len(before) :]

    def _find_final(self) -> tuple[int, ...]:
        """Return what the template puts behind a conversation as a whole, and no more once it goes on: Phi-3's eos."""
        history = [_HELLO, Message("assistant", "x")]
        alone = self._render(history, (), generate=False)
        continued = self._render([*history, _AGAIN], (), generate=True)
        at = next((at for at, (a, b) in enumerate(zip(alone, continued, strict=False)) if a != b), len(alone))
        return tuple(alone[at:]) if set(alone[at:]) <= {self._tokenizer.eos_token_id} else ()

    def _find_close(self) -> tuple[int, ...]:
        """Return what the template puts behind a reply: from its end-of-turn token on."""
        one, two = (self._render([_HELLO, Message("assistant", text)], (), generate=False) for text in ("x", "7"))
        common = 0
        while common < min(len(one), len(two)) and one[-1 - common] == two[-1 - common]:
            common += 1
        suffix = one[len(one) - common :]
        start = next((at for at, token in enumerate(suffix) if token in self._special_ids), None)
        if start is None:
            raise RenderError(
                f"no special token ends the turn in the chat template, which closes a reply with "
                f"{self._decode(suffix)!r}: nothing tells where to stop sampling, add one"
            )
        return tuple(suffix[start:])

    def _require_prefix(self, before: Sequence[int], after: Sequence[int], what: str) -> None:
        pairs = zip(before, after, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
        if at < len(before):
            around = slice(max(0, at - 8), at + 8)
            raise _BreakError(
                f"the chat template rewrites what came before {what}: token {at} of {len(before)} starts to differ, "
                f"{self._decode(before[around])!r} became {self._decode(after[around])!r}"
            )

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> list[int]:
        """Render and encode; special tokens in the environment's messages are encoded as plain text."""
        from jinja2 import TemplateError

        require_text(messages)
        described = [self._mask(json.dumps(tool.openai(), ensure_ascii=False)) for tool in tools]
        masked = [m if m.role == "assistant" else replace(m, content=self._mask(m.content)) for m in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [message_dict(m) for m in self.support.rewrite(masked, described)],
                tools=tool_dicts(tools) if self.support.tools == "template" else None,
                add_generation_prompt=generate,
                tokenize=False,
                **self._options,
            )
        except (TemplateError, TypeError, LookupError) as error:
            roles = ", ".join(m.role for m in messages)
            raise RenderError(f"the chat template does not render a conversation of {roles}: {error}") from error
        tokens = {mask: token for token, mask in self._masks.items() if mask in text}
        ids: list[int] = []
        for piece in re.split(f"([{''.join(tokens)}])", text) if tokens else [text]:
            for part in (tokens[piece][0], tokens[piece][1:]) if piece in tokens else (piece,):
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        if self._final and not generate and tuple(ids[-len(self._final) :]) == self._final:
            del ids[-len(self._final) :]
        return ids

    def _mask(self, text: str) -> str:
        """Replace special tokens; an assistant's text keeps them, as it may hold tags that the template looks for."""
        for token, mask in self._masks.items():
            text = text.replace(token, mask)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


@register_renderer("template-fork")
def template_fork(
    tokenizer: PreTrainedTokenizerBase, missing: Missing = "system", options: Mapping[str, JSON] | None = None
) -> TemplateRenderer:
    """Return a renderer for a chat template that may rewrite the past: it then forks."""
    return TemplateRenderer(tokenizer, on_break="fork", missing=missing, options=options)


@register_renderer("plain")
def plain(tokenizer: PreTrainedTokenizerBase) -> TemplateRenderer:
    """Give a base model's tokenizer a chat template of words, and return its renderer; the model saves it.

    Raises:
        RenderError: if the tokenizer has no token that ends a text.
    """
    if tokenizer.eos_token_id is None:
        raise RenderError(
            f"renderer=plain ends turns by eos_token, which the tokenizer {tokenizer.name_or_path!r} lacks"
        )
    tokenizer.chat_template = (resources.files("agent_rl.rendering") / "plain.j2").read_text(encoding="utf-8")
    return TemplateRenderer(tokenizer)


def _kind(messages: Sequence[Message]) -> str:
    return "tool" if messages and all(m.role == "tool" for m in messages) else "user"
