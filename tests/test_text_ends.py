"""agent_rl.rendering: which ids end a reply, by the template and the model's own generation_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agent_rl.backends.embedded.actor import load_actor, make_actor
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.core.messages import Message
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.rendering.config import RendererConfig
from agent_rl.rendering.generation import text_ends

TEMPLATE = """
{%- for m in messages -%}
{{- '<|user|>' if m.role == 'user' else '<|bot|>' -}}
{%- if m.reasoning_content -%}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- m.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|bot|>' -}}{%- endif -%}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> PreTrainedTokenizerBase:
    made = train_tokenizer([])
    made.chat_template = TEMPLATE
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|bot|>", "<think>", "<|end|>", "<|eom|>"]})
    made.save_pretrained(tmp_path)
    names = ("<|eom|>", "<|end|>", "<think>")
    ends = [*made.convert_tokens_to_ids([*names]), made.convert_tokens_to_ids("7")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return AutoTokenizer.from_pretrained(tmp_path)


def test_template_stops_at_ends_of_generation_config(loaded: PreTrainedTokenizerBase) -> None:
    renderer, (eom, end) = load_renderer(loaded, "template"), loaded.convert_tokens_to_ids(["<|eom|>", "<|end|>"])
    assert renderer.stop_ids == {eom, end, loaded.eos_token_id}  # not what a reply holds, nor text
    said = loaded.encode("7", add_special_tokens=False)
    assert renderer.parse([*said, eom]).content == renderer.parse([*said, end]).content == "7"
    before = renderer.prompt([Message("user", "a")], ())
    bridge = renderer.bridge(before, [*said, eom], [Message("user", "b")])
    assert bridge is not None and bridge.closing == (end,)


@pytest.mark.parametrize(
    ("written", "ends"),
    [(None, []), ("{}", []), ('{"eos_token_id": null}', []), ('{"eos_token_id": 3}', [3]), ("{", [])],
)
def test_text_ends_reads_what_is_there(
    written: str | None, ends: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a tokenizer without a place has none in the working directory
    if written is not None:
        (tmp_path / "generation_config.json").write_text(written)
    assert text_ends(str(tmp_path)) == {*ends} and text_ends("") == text_ends(str(tmp_path / "gone")) == frozenset()


def test_text_ends_of_adapters_are_their_models(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert text_ends(str(adapter)) == frozenset()
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert text_ends(str(adapter)) == {3, 5}
    (adapter / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert text_ends(str(adapter)) == {7}
    (adapter / "generation_config.json").unlink()
    shutil.move(base, tmp_path / "elsewhere")
    assert text_ends(str(adapter)) == frozenset()  # who loads the model says that it is gone


def test_text_ends_takes_what_the_hub_has_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sent.json"
    file.write_text('{"eos_token_id": [3, 5]}')
    kept = {"org/model": str(file), "org/none": object()}  # the hub has none of the second
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, name: kept[model])
    assert text_ends("org/model") == {3, 5} and text_ends("org/none") == frozenset()


def test_checkpoint_ends_replies_where_its_run_did(loaded: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model = make_model(ModelConfig(layers=1, hidden=32, intermediate=48, heads=2, kv_heads=1), len(loaded), 0)
    own = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    for folder in (tmp_path, tmp_path / "bare"):  # with a generation_config.json and without
        loaded.name_or_path = str(folder)
        run = make_actor(model, loaded, context=64, renderer=RendererConfig(name="template"))
        run.save(tmp_path / "checkpoint")
        again = load_actor(tmp_path / "checkpoint", context=64)
        assert again.renderer.stop_ids == run.renderer.stop_ids
        ends = {*again.model.generation_config.eos_token_id}
        assert ends == {*run.renderer.stop_ids, *(own if folder == tmp_path else ())} and len(ends) > 1
