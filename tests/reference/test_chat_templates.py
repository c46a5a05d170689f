"""Every chat template that TRL ships: appends proven, tools rendered, calls read back, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from tree import ROOT

from reference.chat_templates import (
    AGAIN,
    ASK,
    HEAD,
    RESULT,
    SYSTEM,
    TOOL,
    renderer_of,
    said_by,
    table,
    trl_templates,
)
from reference.conftest import required

FOLDER = Path(str(required("trl").__file__)).parent / "chat_templates"
TEMPLATES = trl_templates(FOLDER)


def test_page_has_the_table_of_chat_templates() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert len(TEMPLATES) > 60
    assert table(TEMPLATES) in page, f"docs/models.md: put this below its heading:\n{table(TEMPLATES)}"
    assert page.count(HEAD) == 1


@pytest.mark.parametrize(("name", "tokenizer"), TEMPLATES, ids=[name for name, _ in TEMPLATES])
def test_template_renders_tools_and_reads_calls_back(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    how, renderer = renderer_of(tokenizer)
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
