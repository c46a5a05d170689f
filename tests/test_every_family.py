"""Every family of the package `renderers`, on a small tokenizer of its tokens: tools come out, or are refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import renderers

import agent_rl as ar
from agent_rl.core.messages import Message, ToolCall
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering import FamilyRenderer, TemplateRenderer, families, load_renderer
from agent_rl.rendering.chat_format import message_dict, tool_dicts
from agent_rl.rendering.config import RendererConfig
from agent_rl.rendering.families import matching_family
from agent_rl.rendering.support import Support, describe_additions
from tests.family_tokenizers import tokenizer_of
from tests.templates import ROLES

TOOLLESS = ("deepseek-r1", "deepseek-v3")
"""Their renderers take tools, and leave them out."""
OFFLINE = tuple(name for name in families() if name != "gpt-oss")
"""That of gpt-oss gets its vocabulary from the network."""
TOOL = ToolSpec(
    "search", "Look it up.", {"type": "object", "properties": {"query": {"type": "string", "description": "Words."}}}
)
SYSTEM, ASK = Message("system", "Be brief."), Message("user", "What is it?")
RESULT = Message("tool", "seven", tool_call_id="functions.search:0", name="search")
SAID = Message(
    "assistant", "I look.", reasoning="Hm.", tool_calls=(ToolCall("functions.search:0", "search", {"query": "7"}),)
)


@pytest.mark.parametrize("family", OFFLINE)
def test_family_shows_its_tools_or_refuses_them(family: str) -> None:
    tokenizer = tokenizer_of(family)
    renderer = FamilyRenderer(tokenizer, family)
    assert renderer.shows_tools == (family not in TOOLLESS)
    for opening in ([ASK], [SYSTEM, ASK]):
        assert "What is it?" in tokenizer.decode(renderer.prompt(opening, []))
        if family in TOOLLESS:
            with pytest.raises(ar.RenderError, match=rf"{family}' leaves tools out .* has 'search': set renderer=temp"):
                renderer.prompt(opening, [TOOL])
            continue
        shown = tokenizer.decode(renderer.prompt(opening, [TOOL]))
        assert all(word in shown for word in ("search", "Look it up.", "query", "Words.", "What is it?"))


def reply(renderer: FamilyRenderer) -> list[int]:
    """Return a reply with a script's call; with a thought, unless the header of replies has closed it."""
    said = replace(SAID, tool_calls=(replace(SAID.tool_calls[0], id="call_0"),))
    try:
        return renderer.reply(said)
    except ar.RenderError:
        return renderer.reply(replace(said, reasoning=None))


@pytest.mark.parametrize("family", [name for name in OFFLINE if name != "deepseek-r1"])
def test_family_reads_its_calls_back(family: str) -> None:
    renderer = FamilyRenderer(tokenizer_of(family), family)
    prompt = renderer.prompt([ASK], [TOOL] if renderer.shows_tools else [])
    (call,) = renderer.parse(reply(renderer), prompt, [TOOL]).tool_calls
    assert (call.name, call.arguments, call.error) == ("search", {"query": "7"}, None)


@pytest.mark.parametrize("family", OFFLINE)
def test_family_content_can_not_forge_special_tokens(family: str) -> None:
    tokenizer = tokenizer_of(family)
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    renderer = FamilyRenderer(tokenizer, family)
    said = [*tokenizer.encode("Yes."), min(renderer.stop_ids)] if family in TOOLLESS else reply(renderer)

    def count(words: str) -> int:
        tool = replace(TOOL, description=words, parameters={"type": "object", "properties": {words: {}}})
        tools, result = [tool] if renderer.shows_tools else [], Message("tool", words, tool_call_id="functions.f:0")
        shown = renderer.prompt([Message("system", words), Message("user", words)], tools)
        bridge = renderer.bridge(shown, said, [result], tools)
        assert bridge is not None or family in ("deepseek-r1", "inkling")  # those fork at such a reply
        shown += bridge.ids if bridge else ()
        assert tokenizer.decode(shown).count(words) >= 3 - (bridge is None)
        return sum(token in special for token in shown)

    assert count("So " + "and".join(special.values())) == count("So and so")


@pytest.mark.parametrize("family", OFFLINE)
def test_family_ids_equal_those_of_package(family: str) -> None:
    tokenizer = tokenizer_of(family)
    own = renderers.create_renderer(tokenizer, type(renderers.config_from_name(family))())
    renderer = FamilyRenderer(tokenizer, family)
    tools = [TOOL] if renderer.shows_tools else []
    messages = [SYSTEM, ASK, SAID, replace(RESULT, content="<p>seven</p>"), ASK]
    dicts = [message_dict(m) for m in messages]
    ids = own.render_ids(dicts, tools=tool_dicts(tools), add_generation_prompt=True)
    assert renderer.prompt(messages, tools) == ids


def test_family_that_drops_thoughts_renders_no_script() -> None:
    with pytest.raises(ar.RenderError, match="no policy could have sampled it"):
        reply(FamilyRenderer(tokenizer_of("deepseek-r1"), "deepseek-r1"))


@pytest.mark.parametrize("family", OFFLINE)
def test_name_on_hub_finds_family_that_shows_tools(family: str) -> None:
    tokenizer = copy.deepcopy(tokenizer_of(family))
    tokenizer.chat_template = ROLES
    renderer = load_renderer(tokenizer)
    if family not in TOOLLESS:
        assert isinstance(renderer, FamilyRenderer)
        return
    assert isinstance(renderer, TemplateRenderer)
    assert renderer.support == Support(tools="system", calls="content", reasoning="content")
    assert "tools into the system message" in str(describe_additions(renderer))
    assert "Look it up." in tokenizer.decode(renderer.prompt([ASK], [TOOL]))
    with pytest.raises(ar.RenderError, match=r"leaves out what renderer\.missing=system would write: tools into"):
        load_renderer(tokenizer, RendererConfig(missing="refuse"))


def test_template_without_tools_matches_no_family() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("deepseek-v3"))
    tokenizer.name_or_path = "a/folder"
    tokenizer.chat_template = ROLES
    assert matching_family(tokenizer) is None


def test_family_without_vocabulary_is_refused_with_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: object) -> object:
        raise RuntimeError("failed to download")  # the base of HarmonyError

    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", unreachable)
    with pytest.raises(ar.RenderError, match="family 'gpt-oss' can't be used here: failed to download"):
        FamilyRenderer(tokenizer_of("qwen3"), "gpt-oss")
