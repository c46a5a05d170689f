"""Every chat template that TRL ships: appends proven, tools rendered, calls read back, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from tree import ROOT

from reference.chat_templates import (
    HEAD,
    check_conversation,
    renderer_of,
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
    check_conversation(*renderer_of(tokenizer), tokenizer)
