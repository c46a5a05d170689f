"""Every family of the package `renderers`, on a small tokenizer of its tokens: tools come out, or are refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

import agent_rl as ar
from agent_rl.core.messages import Message, ToolCall
from agent_rl.gym.tool import ToolSpec
from agent_rl.rendering import FamilyRenderer, TemplateRenderer, families, load_renderer
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
    """Return a reply with a call; with a thought, unless the header of replies has closed it."""
    try:
        return renderer.reply(SAID)
    except ar.RenderError:
        return renderer.reply(replace(SAID, reasoning=None))


@pytest.mark.parametrize("family", [name for name in OFFLINE if name != "deepseek-r1"])
def test_family_reads_its_calls_back(family: str) -> None:
    renderer = FamilyRenderer(tokenizer_of(family), family)
    prompt = renderer.prompt([ASK], [TOOL] if renderer.shows_tools else [])
    (call,) = renderer.parse(reply(renderer), prompt, [TOOL]).tool_calls
    assert (call.name, call.arguments, call.error) == ("search", {"query": "7"}, None)


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
