"""What a chat template renders, found and proven on fixed conversations whose words no template has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from agent_rl.core.messages import Message, ToolCall
from agent_rl.errors import RenderError
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering.chat_template import AGAIN, HELLO, THOUGHT, BreakError, ChatTemplate
from agent_rl.rendering.hermes import THINK_END
from agent_rl.rendering.support import Reasoning

_SYSTEM = Message("system", "Be Dromvik.")
_ANSWER = Message("assistant", "It is 7.", reasoning=THOUGHT)
_LOOK = ToolCall("call_0", "look", {"at": "sky", "far": True, "count": 7, "unit": None, "note": 'é "quoted"'})
_CALL = Message("assistant", "I look.", reasoning=THOUGHT, tool_calls=(_LOOK,))
_TWO_CALLS = Message("assistant", "I look.", tool_calls=(_LOOK, ToolCall("call_1", "wait")))
_RESULT = Message("tool", "blue as ever", tool_call_id="call_0", name="look")
WORDS = ("quorvex", "Brimdal", "plenza", "Vostrik")
"""That no template has: a tool's name and description, its argument's name and description."""
TOOL = ToolSpec(
    WORDS[0],
    f"The {WORDS[1]} way.",
    {"type": "object", "properties": {WORDS[2]: {"type": "string", "description": f"Any {WORDS[3]}."}}},
)
_PROBES: tuple[tuple[tuple[Message, ...], Message], ...] = (
    ((HELLO, _ANSWER), AGAIN),
    ((HELLO, _CALL), _RESULT),
    ((HELLO, _CALL, _RESULT, _CALL), _RESULT),
    ((HELLO, _CALL, _RESULT, _ANSWER), AGAIN),
)
Parse = Callable[[Sequence[int], Sequence[int]], Message]
"""From the ids of a reply and of its prompt to the message."""


class Proof:
    """Finds a template's support, and tries whether it only appends."""

    def __init__(self, template: ChatTemplate, parse: Parse) -> None:
        self.template, self._parse = template, parse

    def broken(self) -> Iterator[tuple[str, BreakError]]:
        """Yield the role of each message in front of which the template rewrites what it rendered, and how."""
        toolsets = ((), (TOOL,)) if self.template.support.tools == "template" else ((),)
        for history, new in _PROBES:
            try:
                for tools in toolsets:  # some templates put them in front of the last question
                    self._prove(history, new, tools)
            except BreakError as error:
                yield new.role, error

    def find_support(self, may_break: bool) -> None:
        """Find what the template renders, and read it back; leave the rest to its `support`.

        Raises:
            RenderError: if a reply can't be read back; not if the template rewrites it and `may_break`.
        """
        if not self._comes_out([_SYSTEM, HELLO], (), _SYSTEM.content):
            self.template.support = replace(self.template.support, system="user")
        if not (self._comes_out([HELLO], [TOOL], *WORDS) and self._comes_out([_SYSTEM, HELLO], [TOOL], *WORDS)):
            self.template.support = replace(self.template.support, tools="system")
        problem = self._choose_reasoning() or self._choose_calls()
        if problem is not None and not (may_break and isinstance(problem, BreakError)):
            raise problem
        if not self._takes_results():
            self.template.support = replace(self.template.support, results="user")

    def _choose_reasoning(self) -> RenderError | None:
        choices: tuple[tuple[Reasoning, str | None], ...]
        choices = (("template", THOUGHT), ("content", THOUGHT), ("dropped", None))
        for choice, thought in choices:
            self.template.support = replace(self.template.support, reasoning=choice)
            problem = self._why_not_read(replace(_TWO_CALLS, reasoning=thought, tool_calls=()))
            if problem is None:
                break
        return problem

    def _choose_calls(self) -> RenderError | None:
        thought = None if self.template.support.reasoning == "dropped" else THOUGHT
        problem = self._why_not_read(replace(_TWO_CALLS, reasoning=thought))
        if problem is not None:  # the description of the tools says how to write a call, so that is ours, too
            self.template.support = replace(self.template.support, tools="system", calls="content")
            problem = self._why_not_read(replace(_TWO_CALLS, reasoning=thought))
        return problem

    def _comes_out(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *words: str) -> bool:
        try:
            rendered = self.template.decode(self.template.render(messages, tools, generate=True))
        except RenderError:
            return False
        return all(word in rendered for word in words)

    def _why_not_read(self, message: Message) -> RenderError | None:
        """Return why a reply is not parsed as what was rendered; the ids of calls are the parser's own."""
        try:
            ids = self.template.reply(message)
            read = self._parse(ids, self.template.render([HELLO], (), generate=True))
        except RenderError as error:
            return error
        calls, expected = ([(c.name, dict(c.arguments), c.error) for c in m.tool_calls] for m in (read, message))
        if (read.content.strip(), read.reasoning, calls) == (message.content, message.reasoning, expected):
            return None
        rendered = self.template.decode(ids)
        return RenderError(f"the chat template changes the reply: {message.content!r} becomes {rendered!r}")

    def _takes_results(self) -> bool:
        """Return whether a result comes out, and as nobody else's words."""
        history = [HELLO, _TWO_CALLS]
        results = [_RESULT, replace(_RESULT, content="gone by", tool_call_id="call_1", name="wait")]
        if not self._comes_out([*history, *results], (), *(m.content for m in results)):
            return False
        shown = self.template.render([*history, _RESULT], (), generate=True)
        others = (Message(role, _RESULT.content) for role in ("user", "assistant"))
        if any(self._shows([*history, other], shown) for other in others):
            return False
        if self.template.support.calls == "template":
            return True
        try:  # a template's results may need its calls
            for probe in _PROBES:
                if probe[1].role == "tool":
                    self._prove(*probe)
        except RenderError:
            return False
        return True

    def _shows(self, messages: Sequence[Message], ids: Sequence[int]) -> bool:
        try:
            return self.template.render(messages, (), generate=True) == ids
        except RenderError:  # turns that don't alternate
            return False

    def _prove(self, history: Sequence[Message], new: Message, tools: Sequence[ToolSpec] = ()) -> None:
        header = self.template.render(history[:-1], tools, generate=True)
        if self.template.support.reasoning == "dropped" and not self.template.decode(header).rstrip().endswith(
            THINK_END
        ):
            raise BreakError(f"the chat template changes the reply: it leaves out the thought {THOUGHT!r}")
        before = self.template.render(history, tools, generate=False)
        after = self.template.render([*history, new], tools, generate=True)
        self.template.require_prefix(header, before, "a reply")
        if history[-1].content not in self.template.decode(before):
            shown = self.template.decode(before[len(header) :])
            raise BreakError(f"the chat template changes the reply {history[-1].content!r} to {shown!r}")
        self.template.require_prefix(before, after, f"a {new.role} message")
        tail = self.template.tail([new], tools)
        if after[len(before) :] != tail or new.content not in self.template.decode(tail):
            shown, alone = self.template.decode(after[len(before) :]), self.template.decode(tail)
            raise BreakError(
                f"the chat template renders the {new.role} message {new.content!r} as {shown!r} or {alone!r}, "
                "depending on what came before"
            )
