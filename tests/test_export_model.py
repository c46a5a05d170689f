"""`agent-rl export CHECKPOINT OUT`: what plain transformers loads computes what the checkpoint does."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_rl.backends.embedded.fine_tuning import FreezeConfig, LoraConfig, new_adapter
from agent_rl.cli import main
from agent_rl.engines.embedded.model_folder import in_format, load_model
from agent_rl.engines.model_files import require_model, written
from agent_rl.errors import CheckpointError
from tests.engines import VOCAB
from tests.test_checkpoint import full

IDS = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(folder, tmp_path_factory.mktemp("adapter") / "checkpoint", LoraConfig(rank=4))


def write_adapter(folder: Path, out: Path, lora: LoraConfig) -> Path:
    """Write an adapter of a run's checkpoint, with an effect, and return its folder."""
    model, tokenizer = load_model(folder / "checkpoint")
    new_adapter(model, lora, FreezeConfig(), 0)
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def test_export_of_a_run_loads_in_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert main(["export", str(folder), str(out), "--dtype", "bfloat16"]) == 0
    assert f"{out}: the model of {folder / 'checkpoint'}, " in capsys.readouterr().out
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ours, its = load_model(folder / "checkpoint")
    assert loaded.dtype == torch.bfloat16 and torch.equal(logits(loaded), logits(in_format(ours, "bfloat16")))
    assert tokenizer.chat_template == its.chat_template and tokenizer.get_vocab() == its.get_vocab()
    assert loaded.generation_config.max_new_tokens == ours.generation_config.max_new_tokens
    assert main(["export", str(folder), str(out)]) == 1 and "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--where", "success=yes"], "--where would not be read: say with --to which format episodes get"),
        (["--to", "sft", "--merge", "--dtype", "float16"], "--merge, --dtype would not be read: leave out --to"),
        (["-o", "other"], "or to other? Give one path"),
    ],
)
def test_export_refuses_options_that_nothing_reads(
    options: list[str], says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), str(tmp_path / "out"), *options]) == 1
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_weights_have_the_rights_of_other_files(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder), str(tmp_path / "model")]) == 0
    for place in (folder / "checkpoint", tmp_path / "model"):
        assert len({file.stat().st_mode for file in place.iterdir()}) == 1, place


def test_export_that_does_not_fit_says_so(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full():
        assert main(["export", str(folder), str(tmp_path / "model")]) == 1
    said = r"model can't be written with \d+ MiB free, .*: make room, or name another folder"
    assert re.search(said, capsys.readouterr().err) and not [*tmp_path.iterdir()]


def test_written_names_the_cause_where_no_folder_is(tmp_path: Path) -> None:
    said = r"model can't be written with \d+ MiB free, PermissionError: no rights"
    with pytest.raises(CheckpointError, match=said), written(tmp_path / "a" / "b" / "model"):
        raise PermissionError("no rights")


@pytest.mark.parametrize("dora", [False, True])
def test_export_merges_an_adapter(
    dora: bool, folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = tmp_path_factory.mktemp("exported")
    adapter = write_adapter(folder, tmp_path_factory.mktemp("adapter"), LoraConfig(rank=4, dora=dora))
    assert json.loads((adapter / "adapter_config.json").read_text())["use_dora"] == dora
    assert main(["export", str(adapter), "-o", str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    whole, _ = load_model(adapter, merged=False)
    torch.testing.assert_close(logits(merged), logits(whole), rtol=0, atol=2e-4)
    assert main(["export", str(adapter), "-o", str(tmp_path / "adapter")]) == 0
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert torch.equal(logits(load_model(tmp_path / "adapter")[0]), logits(merged))
    assert main(["export", str(adapter), "-o", str(tmp_path / "half"), "--dtype", "float16"]) == 1
    assert "leave out --dtype, or add --merge" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {"merged", "adapter"}


def test_adapter_as_peft_writes_it_takes_its_models_tokenizer(adapter: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, tmp_path)
    (whole, own), (alike, base) = load_model(adapter), load_model(tmp_path)
    assert torch.equal(logits(alike), logits(whole)) and base.get_vocab() == own.get_vocab()


@pytest.mark.filterwarnings("ignore")  # peft's, of tied weights
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_merge_unties_what_an_adapter_changes_alone(folder: Path, tmp_path: Path, target: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    assert base.config.tie_word_embeddings
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", target], init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), "-o", str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(wrapped.eval()), rtol=0, atol=2e-3)


def test_export_merges_what_verl_wrote(adapter: Path, tmp_path: Path) -> None:
    whole, tokenizer = load_model(adapter, merged=False)
    run = tmp_path / "run" / "checkpoints"
    hub = run / "global_step_2" / "actor" / "huggingface"
    whole.config.dtype = torch.bfloat16  # as verl's say of float32 weights, too
    whole.config.save_pretrained(hub)
    tokenizer.save_pretrained(hub)
    state = {n: p for n, p in whole.state_dict().items() if n != "lm_head.weight"}  # tied
    save_file({f"base_model.model.{name}": tensor for name, tensor in state.items()}, hub / "model.safetensors")
    (hub.parent / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 32, "task_type": "CAUSAL_LM"}))
    for number, source in enumerate((run / "global_step_2", hub)):
        out = tmp_path / str(number)
        assert main(["export", str(source), str(out), "--merge"]) == 0
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), logits(whole), rtol=0, atol=2e-4)


def test_adapter_without_its_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"base_model_name_or_path": os.fspath(tmp_path / "gone")}))
    with pytest.raises(CheckpointError, match="which is gone: put that model back, or its new place into"):
        require_model(tmp_path)
