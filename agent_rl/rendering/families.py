"""The hand-written renderers of the PyPI package `renderers` behind our Protocol, for the model families it knows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from agent_rl.core.messages import JSON, Message, ToolCall
from agent_rl.errors import ConfigError, RenderError, did_you_mean
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering.base import Bridge
from agent_rl.rendering.chat_format import message_dict, require_text, tool_dicts
from agent_rl.rendering.hermes import require_shallow, write_call
from agent_rl.rendering.masks import MaskedTokenizer, Masks
from agent_rl.rendering.template_proof import TOOL, WORDS

if TYPE_CHECKING:
    import renderers
    from transformers import PreTrainedTokenizerBase

_HELLO, _BRIEF = Message("user", "Hello"), Message("system", "s")
_TOOL = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
_TOOLS = [{"type": "function", "function": _TOOL}]
_CALL = Message("assistant", "b", reasoning="a", tool_calls=(ToolCall("functions.f:0", "f", {"x": "1"}),))
_RESULT = Message("tool", "2", tool_call_id="functions.f:0", name="f")
_CONVERSATIONS = (
    [_HELLO],
    [_BRIEF, _HELLO, _CALL, _RESULT],
    [_HELLO, _CALL, _RESULT, _CALL, _RESULT, Message("assistant", "c", reasoning="d"), _HELLO],
)
"""With all that has a frame: tools, system, reasoning, calls, results, a later question."""
_UNREADABLE = (ValueError, RecursionError)
"""What `renderers` lets through from JSON: numbers of 5,000 digits, thousands of open brackets."""
_UNFIT = (AssertionError, LookupError, TypeError, ValueError)
"""What its families raise of a tokenizer that is not theirs, or of a conversation that they don't render."""


def families() -> tuple[str, ...]:
    """Return the names of the model families that `renderers` knows, sorted."""
    import renderers

    configs = get_args(get_args(renderers.RendererConfig)[0])  # Annotated[Union[…], …]
    names = {str(config.model_fields["name"].default) for config in configs}
    return tuple(sorted(names - {"auto", "custom", "default"}))


def family_of(model: str) -> str | None:
    """Return the family of a model by its exact Hugging Face name; fine-tunes may have other templates: None."""
    from renderers.base import MODEL_RENDERER_MAP

    known: Mapping[str, str] = MODEL_RENDERER_MAP
    return known.get(model)


def matching_family(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the family that renders as a tokenizer's own chat template does; None if there is none.

    So it is found for a local folder, and not for a fine-tune that has another template.
    """
    if not tokenizer.chat_template:
        return None
    import renderers

    own = [_by_template(tokenizer, probe) for probe in _CONVERSATIONS]
    for name in sorted(families(), key=len):  # of a model and its variant the model
        if name == "gpt-oss" and "<|channel|>" not in tokenizer.get_vocab():
            continue  # it would look for its vocabulary on the network
        try:
            renderer = renderers.create_renderer(tokenizer, type(renderers.config_from_name(name))())
            if all(ids in (None, _by_hand(renderer, probe)) for ids, probe in zip(own, _CONVERSATIONS, strict=True)):
                return name
        except Exception:  # whatever a family says of a tokenizer that is not its own
            continue
    return None


def _by_hand(renderer: renderers.Renderer, messages: Sequence[Message]) -> list[int]:
    ids: list[int] = renderer.render_ids([message_dict(m) for m in messages], tools=_TOOLS, add_generation_prompt=True)
    return ids


def _by_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int] | None:
    """Return the ids of the tokenizer's own chat template; None if it does not render such a conversation."""
    try:
        text: str = tokenizer.apply_chat_template(
            [message_dict(m) for m in messages], tools=_TOOLS, add_generation_prompt=True, tokenize=False
        )
    except Exception:  # of Jinja, and whatever the template raises
        return None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


class FamilyRenderer:
    """Adapts one of `renderers`' renderers; what it returns as an append is checked id by id.

    A bridge is None where the family's template would rewrite the past: Qwen3 drops its thoughts once the user speaks
    again. `options={"thinking_retention": "all"}` keeps them, and so never forks.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        family: str | None = None,
        options: Mapping[str, JSON] | None = None,
    ) -> None:
        """Choose the family, by the tokenizer's `name_or_path` if it isn't named.

        Args:
            tokenizer: the model's tokenizer, with the family's special tokens.
            family: one of `families()`.
            options: fields of the family's config in `renderers`, such as `enable_thinking`.

        Raises:
            ConfigError: if the family or an option is unknown.
            RenderError: if the tokenizer lacks a special token of the family.
        """
        import renderers

        name = family or family_of(tokenizer.name_or_path)
        if name not in families():
            asked = repr(family) if family else f"the tokenizer of {tokenizer.name_or_path!r}"
            raise ConfigError(f"no renderer family for {asked}.{did_you_mean(name or '', families())} See families().")
        try:
            config = type(renderers.config_from_name(name))(**(options or {}))
        except ValueError as error:
            raise ConfigError(f"renderer family {name!r} does not take the options {options!r}: {error}") from error
        try:
            self._renderer, self._masks = _create(tokenizer, config)
        except _UNFIT as error:
            raise RenderError(f"the tokenizer does not fit the family {name!r}: {error}") from error
        except RuntimeError as error:  # of gpt-oss, whose package gets its vocabulary from the network
            raise RenderError(f"the family {name!r} can't be used here: {error}") from error
        self._tokenizer, self._family = tokenizer, name
        self.stop_ids: frozenset[int] = frozenset(self._renderer.get_stop_token_ids())
        self.shows_tools: bool = all(self._shows_tool(messages) for messages in ([_HELLO], [_BRIEF, _HELLO]))
        """Whether a made-up tool comes out in a prompt; if not, a conversation with tools is refused."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Render the whole conversation up to the header of the policy's reply.

        Raises:
            RenderError: if there are no messages, or there are tools and the family does not show them.
        """
        if not messages:
            raise RenderError("no messages to render: an environment's reset must return at least one")
        if tools and not self.shows_tools:
            raise RenderError(
                f"the renderer of the family {self._family!r} leaves tools out of the prompt, and the environment has "
                f"{', '.join(repr(tool.name) for tool in tools)}: set renderer=template, which writes them into the "
                "system message if the model's chat template leaves them out, too"
            )
        ids: list[int] = self._render(messages, tools, generate=True).token_ids
        return ids

    def bridge(
        self, prefix: Sequence[int], reply: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> Bridge | None:
        """Render the ids behind `prefix + reply`; None if the family's template would rewrite these."""
        require_text(messages)
        before = [*prefix, *reply]
        dicts, described = self._dicts(messages, tools)
        try:
            after = self._renderer.bridge_to_next_turn(list(prefix), list(reply), dicts, tools=described)
        except _UNREADABLE:  # some families parse the reply on the way
            return None
        if after is None or after.token_ids[: len(before)] != before:
            return None
        tail = after.token_ids[len(before) :]
        owners = after.message_indices[len(before) :]
        opens = next((at for at, owner in enumerate(owners) if owner >= 0), 0)  # the first token of a new message
        return Bridge(tuple(tail[:opens]), tuple(tail[opens:]))

    def parse(self, reply: Sequence[int], prefix: Sequence[int] = (), tools: Sequence[ToolSpec] = ()) -> Message:
        """Read a sampled reply with the family's own grammar."""
        try:
            parsed = self._renderer.parse_response(list(reply), prompt_ids=list(prefix), tools=tool_dicts(tools))
        except _UNREADABLE as error:
            return Message("assistant", tool_calls=(ToolCall(id="call_0", name="", error=f"not readable: {error}"),))
        calls = tuple(_tool_call(call, index) for index, call in enumerate(parsed.tool_calls))
        return Message("assistant", parsed.content, reasoning=parsed.reasoning_content or None, tool_calls=calls)

    def reply(self, message: Message) -> list[int]:
        """Render an assistant message as a policy would have sampled it, stop id included.

        Raises:
            RenderError: if the family renders a reply in a way that no policy could have sampled it.
        """
        header = self._render([_HELLO], (), generate=True).token_ids
        # Kimi has a call's name in its id alone
        calls = (replace(c, id=f"functions.{c.name}:{at}") for at, c in enumerate(message.tool_calls))
        whole = self._render([_HELLO, replace(message, tool_calls=tuple(calls))], (), generate=False)
        if whole.token_ids[: len(header)] != header or not whole.sampled_mask:
            raise RenderError(
                f"the family's header {self._decode(header[-8:])!r} does not lead to {message!r}: no policy could have "
                f"sampled it; where the header opens a thought, give the message `reasoning`"
            )
        end = max(at for at, sampled in enumerate(whole.sampled_mask) if sampled) + 1
        ids: list[int] = whole.token_ids[len(header) : end]
        return ids if ids and ids[-1] in self.stop_ids else [*ids, self._renderer.get_stop_token_ids()[0]]

    def _shows_tool(self, messages: Sequence[Message]) -> bool:
        try:
            shown = self._decode(self._render(messages, [TOOL], generate=True).token_ids)
        except _UNFIT:
            return False
        return all(word in shown for word in WORDS)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool
    ) -> renderers.RenderedTokens:
        require_text(messages)
        dicts, described = self._dicts(messages, tools)
        return self._renderer.render(dicts, tools=described, add_generation_prompt=generate)

    def _dicts(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Any, Any]:
        """Return messages and tools as `renderers` takes them; an assistant's words keep the tags that it looks for."""
        dicts, described = [message_dict(m) for m in messages], tool_dicts(tools)
        if self._masks is None:
            return dicts, described
        masked = [d if d["role"] == "assistant" else self._masks.hide_within(d) for d in dicts]
        return masked, described and [self._masks.hide_within(tool) for tool in described]


def _tool_call(parsed: renderers.ParsedToolCall, index: int) -> ToolCall:
    from renderers import ToolCallParseStatus as Status

    arguments = parsed.arguments if isinstance(parsed.arguments, dict) else {}
    name = parsed.name if isinstance(parsed.name, str) else ""
    call = ToolCall(id=parsed.id or f"call_{index}", name=name, arguments=arguments)
    if parsed.status not in (Status.OK, Status.UNKNOWN_TOOL):  # the environment answers for unknown tools
        return replace(call, error=f"{parsed.status.replace('_', ' ')}: {parsed.raw!r}")
    if not name or not isinstance(parsed.arguments, dict):
        return replace(call, error=f"no name, or arguments that are not a JSON object: {parsed.raw!r}")
    try:
        written = write_call(call)
        written.encode()
        require_shallow(arguments, written)
    except (ValueError, RecursionError) as error:  # infinity, half a surrogate pair: nothing that can be stored
        return replace(call, arguments={}, error=str(error))
    return call


def _create(
    tokenizer: PreTrainedTokenizerBase, config: renderers.RendererConfig
) -> tuple[renderers.Renderer, Masks | None]:
    """Create the renderer, with a tokenizer that finds no special tokens in content.

    `renderers` encodes content with special tokens on, so that a tool's result could forge a turn. Families that write
    their own special tokens as ids render the same with them off; that is tried here. For the others, `Masks` hide them
    in content.
    """
    import renderers

    usual = renderers.create_renderer(tokenizer, config)
    careful_tokenizer = copy.deepcopy(tokenizer)
    careful = renderers.create_renderer(careful_tokenizer, config)
    careful_tokenizer.split_special_tokens = True  # not sooner: DeepSeek's encode them to find their ids
    if _probe(careful) == _probe(usual):
        return careful, None
    masks = Masks(tokenizer)
    return renderers.create_renderer(MaskedTokenizer(tokenizer, masks), config), masks


def _probe(renderer: renderers.Renderer) -> list[list[int] | None]:
    """Render a conversation with all frames: its beginning, as a whole, and its continuation."""
    start, later = ([message_dict(m) for m in part] for part in (_CONVERSATIONS[1][:2], _CONVERSATIONS[1][2:]))
    prompt: list[int] = renderer.render_ids(start, tools=_TOOLS, add_generation_prompt=True)
    whole: list[int] = renderer.render_ids([*start, *later], tools=_TOOLS, add_generation_prompt=True)
    bridge = renderer.bridge_to_next_turn(prompt, prompt[:1], later[1:], tools=_TOOLS)
    return [prompt, whole, bridge and bridge.token_ids]
