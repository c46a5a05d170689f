"""Models by a folder, a name on the hub, or a GGUF file: what is loaded, and what is said where nothing is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import huggingface_hub
import peft
import pytest
import torch
from gguf import GGUFWriter
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.engines import model_files
from agent_rl.engines.embedded.model_folder import load_model, make_engine, save_model
from agent_rl.errors import CheckpointError
from agent_rl.policy.by_name import PolicyConfig, open_policy
from agent_rl.rendering import train_tokenizer
from tests.engines import shaken
from tests.families import make

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["What is 12 + 3? It is 15."], 432)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(**shape, num_key_value_heads=2, vocab_size=len(tokenizer) + 5, max_position_embeddings=64)
    return shaken(Qwen2ForCausalLM(config))


def save(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_loaded_model_learns_from_its_padding_token(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    make_engine(model, tokenizer, slots=1, context=64)  # from now on its config names the token
    save(tmp_path, model, tokenizer)
    pad, found = model.config.pad_token_id, load_model(tmp_path)[0]
    assert pad is not None
    for one in (model, found):
        one(torch.tensor([[5, pad, 7]])).logits[0, -1, 9].backward()
    of_fresh, of_loaded = (one.get_input_embeddings().weight.grad[pad] for one in (model, found))
    assert float(of_fresh.norm()) > 1e-6
    torch.testing.assert_close(of_loaded, of_fresh)


def test_load_model_serves_threads_at_once(folder: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        loaded = [*threads.map(load_model, [folder / "checkpoint"] * 8)]
    assert not any(parameter.is_meta for model, _ in loaded for parameter in model.parameters())


def test_tokenizer_without_an_end_leaves_the_models(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    model.config.eos_token_id = model.generation_config.eos_token_id = 7
    tokenizer.eos_token = None
    make_engine(model, tokenizer, slots=1, context=64)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 7


def test_text_model_within_a_larger_one_gets_an_engine(tokenizer: PreTrainedTokenizerBase) -> None:
    model = make("gemma3")
    assert not hasattr(model.config, "eos_token_id")
    assert make_engine(model, tokenizer, slots=1, context=64).context_limit == 64
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_policy_of_few_positions_has_a_context_of_them(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save(tmp_path, model, tokenizer)
    env = replace(ar.spec("calculator-v0"), budget=ar.Budget())
    with open_policy(PolicyConfig(name=str(tmp_path)), ar.SamplingParams(), env) as policy:
        assert policy.engine.context_limit == ar.load(tmp_path).engine.context_limit == 64


def test_tokenizer_that_writes_beyond_the_model_is_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.add_tokens([f"<unused{i}>" for i in range(5)])
    tokenizer.add_tokens(["<image>"])  # beyond the model's rows, and nothing writes it
    save(tmp_path, model, tokenizer)
    assert ar.load(tmp_path).renderer.prompt([ar.Message("user", "a")], ())
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_start|>", "<image>")
    tokenizer.save_pretrained(tmp_path)
    said = rf"up to {len(tokenizer) - 1}, and the model has embeddings of {len(tokenizer) - 1} tokens: .*resize_token"
    with pytest.raises(CheckpointError, match=said):
        ar.load(tmp_path, renderer="template")
    model.resize_token_embeddings(432)
    tokenizer = train_tokenizer([f"{i * 7919}abc{i}" for i in range(500)], 600)
    save(tmp_path, model, tokenizer)
    with pytest.raises(CheckpointError, match=r"token ids up to 59\d, .* of 432 tokens"):
        ar.load(tmp_path)


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapter_that_has_no_sum_with_its_model_is_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    base, adapter = str(tmp_path / "base"), tmp_path / "adapter"
    save(Path(base), model, tokenizer)
    model.name_or_path = base
    settings = peft.LoraConfig(target_modules=["o_proj"], lora_bias=True, task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(str(adapter))
    with pytest.raises(CheckpointError, match="can't be loaded, RuntimeError: Impossible to merge LoRA"):
        load_model(adapter)


def write_gguf(file: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """As llama.cpp's converter would, in float32."""
    writer, config = GGUFWriter(file, "qwen2"), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer))) + [f"[PAD{i}]" for i in range(5)]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    weights = model.state_dict()
    for ours, theirs in NAMES.items():
        places = [(f"blk.{i}.{ours}", f"model.layers.{i}.{theirs}") for i in range(config.num_hidden_layers)]
        for place, name in places if ours.startswith(("attn", "ffn")) else [(ours, theirs)]:
            for part in ("weight", "bias"):
                if f"{name}.{part}" in weights:
                    writer.add_tensor(f"{place}.{part}", weights[f"{name}.{part}"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_is_the_model_that_was_written(
    tmp_path: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, tokenizer)
    loaded, own = load_model(file)
    ids = torch.tensor([own.encode("It is 15.", add_special_tokens=False)])
    assert own.decode(ids[0]) == "It is 15." and loaded.dtype == torch.float32
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    narrow, _ = load_model(file, dtype="bfloat16")
    narrow.save_pretrained(tmp_path / "saved")
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}
    with open_policy(PolicyConfig(name=str(file), context=32), ar.SamplingParams(), ar.spec("calculator-v0")) as policy:
        assert policy.engine.context_limit == 32


def test_gguf_file_without_its_reader_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ar.CheckpointError, match=r"no model in '.*tiny.gguf': there is no such file"):
        load_model(tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ar.CheckpointError, match=r"tiny.gguf' can't be loaded"):
        load_model(tmp_path / "tiny.gguf")
    monkeypatch.setattr(model_files, "find_spec", lambda name: None)
    with pytest.raises(ar.CheckpointError, match=r"pip install 'agent-rl\[gguf\]'"):
        load_model(tmp_path / "tiny.gguf")


def test_hub_id_that_cannot_be_had_is_refused_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(model_files, "_answers", {})

    def refuse(url: str, **kwargs: object) -> None:
        asked.append(url)
        raise httpx.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(ar.CheckpointError, match="no such folder here, and as a name on Hugging Face's hub") as error:
        load_model("no-such-organisation/tiny")
    assert "ConnectError" in str(error.value) and str(error.value).count("\n") < 3
    assert len(asked) == 1 and asked[0].endswith("no-such-organisation/tiny/resolve/main/config.json")
    with pytest.raises(ar.CheckpointError, match="no-such-organisation/tiny"):
        ar.train("calculator-v0", start_from="no-such-organisation/tiny")
    assert main(["train", "start_from=no-such-organisation/tiny"]) == 1 and len(asked) == 1
    monkeypatch.setattr(model_files, "REMEMBERED", 0.0)
    with pytest.raises(ar.CheckpointError):
        load_model("no-such-organisation/tiny")
    assert len(asked) == 2


def test_missing_folder_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **kwargs: pytest.fail("asked"))
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in ("runs/latest", "./a/b", "/no/such/folder"):
        with pytest.raises(ar.CheckpointError, match=r"has no config.json; .* a name on the hub such as org/model"):
            load_model(name)


def test_downloaded_model_serves_without_the_hub(
    tmp_path: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    save(snapshot, model, tokenizer)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **kwargs: 1 / 0)
    loaded, own = load_model("org/tiny")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight) and len(own) == len(tokenizer)


def test_engine_leaves_a_models_several_ends_of_a_reply(
    tmp_path: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.pad_token = None
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7]
    model.to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, own = load_model(tmp_path)
    engine = make_engine(loaded, own, slots=2, context=64)
    assert loaded.dtype == torch.float32 and engine.vocab_size == len(tokenizer) + 5
    assert loaded.generation_config.eos_token_id == [tokenizer.eos_token_id, 7]
    assert loaded.config.eos_token_id == tokenizer.eos_token_id and loaded.config.pad_token_id is None


def test_model_of_quantised_weights_is_refused(
    tmp_path: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    save(tmp_path / "whole", model, tokenizer)
    packing = BitsAndBytesConfig(load_in_8bit=True)
    packed = Qwen2ForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=packing)
    save(tmp_path / "packed", packed, tokenizer)
    with pytest.raises(
        CheckpointError, match=r"its weights are packed by bitsandbytes, .* unpacked only; take another"
    ):
        load_model(tmp_path / "packed")


def test_load_model_holds_all_weights_in_one_format(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    make("ernie4_5_moe").save_pretrained(tmp_path)  # whose routers transformers keeps in float32
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_saved_model_keeps_a_temperature_that_nothing_uses(
    tmp_path: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    save(tmp_path, model, tokenizer)
    own = {"eos_token_id": [7], "temperature": 0.6}  # without do_sample
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    loaded, tokenizer = load_model(tmp_path)
    make_engine(loaded, tokenizer, slots=1, context=64)  # changes its ends
    save_model(loaded, tokenizer, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert written["temperature"] == loaded.generation_config.temperature == 0.6
    load_model(tmp_path / "saved")
