"""The chat templates that TRL ships, with small tokenizers of their special tokens, and what we make of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agent_rl.core.messages import Message, ToolCall
from agent_rl.errors import RenderError
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering import FamilyRenderer, Renderer, load_renderer, train_tokenizer
from agent_rl.rendering.families import matching_family
from agent_rl.rendering.support import Support

TOOL = ToolSpec(
    "search",
    "Look it up.",
    {"type": "object", "properties": {"query": {"type": "string", "description": "Any words."}}, "required": ["query"]},
)
SYSTEM, ASK, AGAIN = Message("system", "Be brief."), Message("user", "What is it?"), Message("user", "And then?")
SAID = Message("assistant", "I look.", tool_calls=(ToolCall("call_0", "search", {"query": "blue sky"}),))
RESULT = Message("tool", "seven", tool_call_id="call_0", name="search")
_SPECIAL = re.compile(
    r"<\|[^<>|\s'\"]{1,40}\|?>|<[^<>|\s'\"]{1,40}\|>|<\|\"\|>|<\uff5c[^\uff5c]{1,40}\uff5c>|</?s>|<(?:start|end)_of_\w+>|"
    r"\[/?[A-Z_]+\]|\[gMASK\]|<sop>|<eos>|<bos>"
)
_BEGIN = ("<|begin_of_text|>", "<bos>", "<s>")
HEAD = "| chat templates | renderer | tools and calls | results | thoughts |\n|---|---|---|---|---|\n"


@cache
def _bare() -> PreTrainedTokenizerFast:
    made = train_tokenizer([])
    tags = ("<think>", "</think>", "<tool_response>", "</tool_response>")
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    del made.init_kwargs["agent_rl_renderer"]
    return made


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer that has a chat template and its special tokens."""
    made = copy.deepcopy(_bare())
    tokens = dict.fromkeys([*_SPECIAL.findall(template), "</s>"])
    begin = next((token for token in _BEGIN if token in template), "<s>")
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    made.add_special_tokens({"eos_token": "</s>", "bos_token": begin})
    made.chat_template = template
    return made


def renderer_of(tokenizer: PreTrainedTokenizerFast) -> tuple[str, Renderer | None]:
    """Return the renderer that a tokenizer gets, or that it gets with forks, with its name and what is to say of it."""
    try:
        family = matching_family(tokenizer)
        return f"`renderer={family or 'template'}`", load_renderer(tokenizer)
    except RenderError as error:
        why = str(error).removeprefix("the chat template ").split(":")[0].split(", which")[0]
    try:
        renderer = load_renderer(tokenizer, "template-fork")
        said_by(renderer)
    except RenderError:
        return f"refused: {why}", None
    return f"`renderer=template-fork`: {why}", renderer


def said_by(renderer: Renderer) -> Message:
    """Return a reply with a call; with a thought, where the header of replies opens one."""
    try:
        renderer.reply(SAID)
    except RenderError:
        thought = replace(SAID, reasoning="Hm.")
        renderer.reply(thought)
        return thought
    return SAID


def table(templates: Sequence[tuple[str, PreTrainedTokenizerFast]]) -> str:
    """Return the page's table: templates with the same outcome share a row."""
    rows: dict[str, list[str]] = {}
    for name, tokenizer in templates:
        rows.setdefault(" | ".join(_outcome(*renderer_of(tokenizer))), []).append(name)
    lines = sorted((outcome, ", ".join(names)) for outcome, names in rows.items())
    return HEAD + "".join(f"| {names} | {outcome} |\n" for outcome, names in lines)


def _outcome(how: str, renderer: Renderer | None) -> Iterator[str]:
    yield how
    if renderer is None:
        yield from ("", "", "")
    elif isinstance(renderer, FamilyRenderer):
        yield from ("its own",) * 3
    else:
        support = getattr(renderer, "support", None)
        assert isinstance(support, Support)
        own = {"template": "its own", "content": "`<think>`", "dropped": "dropped", "user": "`<tool_response>`"}
        yield "its own" if support.calls == "template" == support.tools else "Hermes"
        yield own[support.results]
        yield own[support.reasoning]


def trl_templates(folder: Path) -> list[tuple[str, PreTrainedTokenizerFast]]:
    """Return the templates in a folder by name."""
    return [(file.stem, tokenizer_of(file.read_text())) for file in sorted(folder.glob("*.jinja"))]


def check_conversation(how: str, renderer: Renderer | None, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that a conversation shows its tools, that a call is read back, and that results are appended."""
    if renderer is None:
        assert how.startswith("refused: ")
        return
    said = said_by(renderer)
    prompt = renderer.prompt([SYSTEM, ASK], [TOOL])
    shown = tokenizer.decode(prompt)
    for word in ("Be brief.", "search", "Look it up.", "query", "Any words.", "What is it?"):
        assert word in shown
    reply = renderer.reply(said)
    read = renderer.parse(reply, prompt, [TOOL])
    assert read.content.strip() == "I look."
    assert [(c.name, c.arguments, c.error) for c in read.tool_calls] == [("search", {"query": "blue sky"}, None)]
    for new in ([RESULT], [RESULT, AGAIN]):
        bridge = renderer.bridge(prompt, reply, new, [TOOL])
        if bridge is None:
            assert how.startswith("`renderer=template-fork`") or new[-1] is AGAIN
            continue
        appended = tokenizer.decode(list(bridge.ids))
        assert all(message.content in appended for message in new)
        assert not re.search(r"Look it up|What is it", appended)
