"""A bridge for any chat template that only appends: proven on token ids, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Literal

from agent_rl.core.messages import JSON, Message
from agent_rl.errors import ConfigError, RenderError
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering.base import Bridge
from agent_rl.rendering.by_name import register_renderer
from agent_rl.rendering.chat_template import BreakError, ChatTemplate, kind_of
from agent_rl.rendering.generation import text_ends
from agent_rl.rendering.hermes import THINK, read_hermes
from agent_rl.rendering.support import Support
from agent_rl.rendering.template_proof import Proof

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnBreak = Literal["refuse", "fork"]
Missing = Literal["system", "refuse"]


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
        self._template, self._parser, self._on_break = ChatTemplate(tokenizer, options), parser, on_break
        self.stop_ids = self._template.stop_ids
        proof = Proof(self._template, self.parse)
        proof.find_support(may_break=on_break == "fork")
        if missing == "refuse" and self.support.added:
            raise RenderError(
                f"the chat template leaves out what renderer.missing=system would write: {self.support.added}"
            )
        self.stop_ids |= self._template.ends_among(text_ends(tokenizer.name_or_path))
        self._broken = set[str]()
        for role, error in proof.broken():
            if on_break == "refuse":
                raise RenderError(
                    f"{error}. Accept a fork at such turns with renderer=template-fork, or name the model's family if "
                    f"`renderers` has it, such as renderer=qwen3"
                ) from error
            self._broken.add(role)

    @property
    def support(self) -> Support:
        """What the template renders, and what is written into its messages."""
        return self._template.support

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Render the whole conversation up to the header of the policy's reply."""
        return self._template.render(messages, tools, generate=True)

    def bridge(
        self, prefix: Sequence[int], reply: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> Bridge | None:
        """Render the ids behind the reply; None (with `on_break="fork"`) if the template would rewrite it."""
        if kind_of(messages) in self._broken:
            return None
        try:
            tail = self._template.tail(messages, tools)
        except BreakError:
            if self._on_break == "fork":
                return None
            raise
        close = self._template.close
        closed = bool(reply) and reply[-1] == close[0]
        return Bridge(close[1:] if closed else close, tuple(tail))

    def parse(self, reply: Sequence[int], prefix: Sequence[int] = (), tools: Sequence[ToolSpec] = ()) -> Message:
        """Decode a sampled reply and hand it to the parser, with the `<think>` that its prompt may have opened."""
        stop = next((at for at, token in enumerate(reply) if token in self.stop_ids), len(reply))
        opened = self._template.decode(prefix[-8:]).rstrip().endswith(THINK)
        return self._parser((THINK if opened else "") + self._template.decode(reply[:stop]))

    def reply(self, message: Message) -> list[int]:
        """Render an assistant message as a policy would have sampled it, stop id included."""
        return self._template.reply(message)


@register_renderer("template-fork")
def template_fork(
    tokenizer: PreTrainedTokenizerBase, missing: Missing = "system", options: Mapping[str, JSON] | None = None
) -> TemplateRenderer:
    """Return a renderer for a chat template that may rewrite the past: it then forks."""
    return TemplateRenderer(tokenizer, on_break="fork", missing=missing, options=options)


@register_renderer("plain")
def plain(tokenizer: PreTrainedTokenizerBase) -> TemplateRenderer:
    """Give a base model's tokenizer a chat template of words, and return its renderer; the model saves it.

    It begins with the token that the tokenizer puts in front of every text, if it does.

    Raises:
        RenderError: if the tokenizer has no token that ends a text.
    """
    if tokenizer.eos_token_id is None:
        raise RenderError(
            f"renderer=plain ends turns by eos_token, which the tokenizer {tokenizer.name_or_path!r} lacks"
        )
    template = (resources.files("agent_rl.rendering") / "plain.j2").read_text(encoding="utf-8")
    begins = tokenizer.bos_token_id is not None and tokenizer.encode("a")[0] == tokenizer.bos_token_id
    tokenizer.chat_template = ("{{- bos_token -}}" if begins else "") + template  # Gemma and Llama know no text without
    return TemplateRenderer(tokenizer)
