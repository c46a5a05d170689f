"""A model's folder in Hugging Face's format, loaded and put behind an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agent_rl.engines.base import WeightFormat
from agent_rl.engines.embedded.adapters import load_adapter, merge, verl_weights
from agent_rl.engines.embedded.device import device_of
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.quantization import forward_in
from agent_rl.engines.model_files import base_model, require_model
from agent_rl.errors import CheckpointError


def load_model(
    folder: str | Path, device: str = "cpu", *, dtype: str = "float32", merged: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a folder's model, in a format on a device, and its tokenizer.

    An adapter's folder is loaded with the model that it was trained on; `merged` into its weights or beside them.

    Raises:
        CheckpointError: if the folder holds no model, or a damaged one.
        ConfigError: if this machine has no such device.
    """
    require_model(folder)
    base, place = base_model(folder), device_of(device)
    try:
        weights = verl_weights(folder)
        model = _read(base or folder, dtype) if weights is None else _made_of(folder, weights, dtype)
        model = model.to(place)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # what its many readers raise about a file that is cut short or missing
        raise CheckpointError(
            f"the model in '{folder}' can't be loaded, {type(error).__name__}: {str(error)[:200]}; take another folder"
        ) from error
    if base is not None:
        load_adapter(model, folder)
    return merge(model) if merged else model, tokenizer


def _read(folder: str | Path, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def _made_of(folder: str | Path, weights: dict[str, Tensor], dtype: str) -> PreTrainedModel:
    """Return the model of a folder's config with these weights."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tied = set(model.state_dict()) - dict(model.named_parameters()).keys()
    if wrong := [*(set(weights) ^ set(model.state_dict())) - tied]:
        raise ValueError(f"{wrong[0]} is not both in the weights and in the model")
    model.load_state_dict(weights, strict=False)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return in_format(model, dtype)


def in_format(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Round a model's parameters to a format, in place; buffers, such as those of positions, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def make_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    slots: int,
    context: int,
    weights: WeightFormat = "float32",
) -> Engine:
    """Return an engine over a model, which gets the tokenizer's special tokens and leaves training mode.

    It samples `slots` sequences of at most `context` tokens at a time, from weights that are rounded to a format.
    """
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.eval()
    return Engine(model, slots=slots, max_len=context, forward=forward_in(weights))
