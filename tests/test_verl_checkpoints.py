"""agent_rl.backends.verl.driver.checkpoints: what a checkpoint takes on disk, by parameters and parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from transformers import AutoTokenizer

import agent_rl as ar
from agent_rl.backends.verl.driver.checkpoints import (
    bytes_of_parts,
    describe_checkpoint,
    finish_model,
    parameters_of,
    record_evaluation,
    remove_old,
)
from agent_rl.rendering import ChatMLRenderer, TemplateRenderer, load_renderer, train_tokenizer
from agent_rl.rendering.config import RendererConfig


def verl(model: Path, dtype: str = "fp32", critic: bool = False) -> DictConfig:
    contents = {"checkpoint": {"save_contents": ["model", "optimizer", "extra", "hf_model"]}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": contents | {"fsdp_config": {"model_dtype": dtype}},
                "model": {"path": str(model)},
            },
            "critic": {"enable": critic, "checkpoint": {"save_contents": ["model", "optimizer", "extra"]}},
            "data": {"agent_rl": {"keep_checkpoints": 2}},
        }
    )


def test_parameters_are_read_from_every_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"b": torch.zeros(7)}, tmp_path / "model-2.safetensors")
    assert parameters_of(tmp_path) == 22 and parameters_of(tmp_path / "hub") is None


def test_parts_follow_precision_and_critic(tmp_path: Path) -> None:
    assert bytes_of_parts(verl(tmp_path)) == {"model": 4, "optimizer": 8, "hf_model": 4}
    assert bytes_of_parts(verl(tmp_path, "bf16")) == {"model": 2, "optimizer": 4, "hf_model": 2}
    assert sum(bytes_of_parts(verl(tmp_path, critic=True)).values()) == 28


def test_adapters_alone_take_next_to_nothing(tmp_path: Path) -> None:
    lora = verl(tmp_path)
    lora.actor_rollout_ref.model.lora_rank = 16
    assert bytes_of_parts(lora) == {"model": 4, "hf_model": 4}
    lora.actor_rollout_ref.actor.checkpoint.save_lora_only = True
    assert bytes_of_parts(lora) == {"hf_model": 4}


def test_description_says_size_and_number(tmp_path: Path) -> None:
    unknown = describe_checkpoint(verl(tmp_path))
    assert "16 bytes a parameter (model 4, optimizer 8, hf_model 4)" in unknown and "how many is not known" in unknown
    save_file({"a": torch.zeros(1000, 1000)}, tmp_path / "model.safetensors")
    assert describe_checkpoint(verl(tmp_path)) == (
        "a checkpoint takes 0.016 GB: 1,000,000 parameters, 16 bytes a parameter (model 4, optimizer 8, hf_model 4); "
        "kept are the last 2 and the best in evaluation: 0.048 GB"
    )


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("")
    for step, success in ((5, 0.9), (10, 0.9), (15, 0.2), (100, None)):
        checkpoint = tmp_path / "checkpoints" / f"global_step_{step}"
        (checkpoint / "actor" / "huggingface").mkdir(parents=True)
        if success is not None:
            record_evaluation(checkpoint, success)
    assert ar.Run(tmp_path).best == tmp_path / "checkpoints" / "global_step_10" / "actor" / "huggingface"
    assert remove_old(tmp_path / "checkpoints", keep=1) == [5, 15]
    assert ar.Run(tmp_path).best.exists()
    (tmp_path / "checkpoints" / "global_step_10" / "evaluation.json").unlink()
    with pytest.raises(ar.CheckpointError, match="no best weights"):
        _ = ar.Run(tmp_path).best


@pytest.mark.parametrize(("given", "kind"), [({}, ChatMLRenderer), ({"name": "template"}, TemplateRenderer)])
def test_checkpoint_remembers_the_renderer_of_its_run(given: dict[str, str], kind: type, tmp_path: Path) -> None:
    saved = tmp_path / "actor" / "huggingface"
    train_tokenizer([]).save_pretrained(saved)  # as verl saves the one to start from, which remembers chatml
    save_file({"weight": torch.zeros(2)}, saved / "model.safetensors")
    finish_model(tmp_path, RendererConfig.model_validate(given).model_dump_json())
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1, "some can't be read by others"
    assert isinstance(load_renderer(AutoTokenizer.from_pretrained(saved)), kind)
