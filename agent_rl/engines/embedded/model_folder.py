"""A model in Hugging Face's format, of its hub or in a GGUF file, loaded and put behind an engine."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import Embedding
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
from agent_rl.engines.model_files import base_model, load_options, require_model, share_weights
from agent_rl.errors import CheckpointError, in_brief

_reading = threading.Lock()
"""Transformers changes torch's functions while it reads a model: another thread's would have no weights."""


def load_model(
    folder: str | Path, device: str = "cpu", *, dtype: str = "float32", merged: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model, in a format on a device, and its tokenizer: of a folder, of the hub by name, or of a GGUF file.

    An adapter's folder is loaded with the model that it was trained on, and with that one's tokenizer if it has none;
    `merged` into its weights or beside them. A GGUF file's weights are dequantised.

    Raises:
        CheckpointError: if there is no model, or a damaged one, or one whose weights are quantised.
        ConfigError: if this machine has no such device.
    """
    require_model(folder)
    base, place = base_model(folder), device_of(device)
    try:
        weights = verl_weights(folder)
        model = _read(base or folder, dtype) if weights is None else _made_of(folder, weights, dtype)
        owner = folder if base is None or any(Path(folder).glob("tokenizer*")) else base  # peft itself writes none
        tokenizer = AutoTokenizer.from_pretrained(**load_options(owner))
    except Exception as error:  # what its many readers raise about a file that is cut short or missing
        raise unloadable(folder, error) from error
    embedding = model.get_input_embeddings()
    if isinstance(embedding, Embedding):
        embedding.padding_idx = None  # it can be sampled like any other token, and learns, as it does in a fresh model
    if base is not None:
        load_adapter(model, folder)
    model.to(place)
    try:
        return merge(model) if merged else model, tokenizer
    except RuntimeError as error:  # of peft, about an adapter that has no sum with its model, such as `lora_bias`
        raise unloadable(folder, error) from error


def unloadable(folder: str | Path, error: Exception) -> CheckpointError:
    """Return the error that says why a model can't be loaded."""
    said = f"{type(error).__name__}: {in_brief(error)}"
    return CheckpointError(f"the model in '{folder}' can't be loaded, {said}; take another one")


def _read(folder: str | Path, dtype: str) -> PreTrainedModel:
    options: dict[str, object] = {**load_options(folder), "dtype": getattr(torch, dtype)}
    if "gguf_file" in options and (packed := getattr(transformers, "GgufConfig", None)):
        # left packed, it could be neither trained nor saved; older releases have no such setting and always unpack
        options["quantization_config"] = packed(dequantize=True)
    with _reading:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**options)
    if getattr(model, "is_quantized", False):
        packed_by = model.config.quantization_config.quant_method
        named = getattr(packed_by, "value", packed_by)
        raise ValueError(f"its weights are packed by {named}, and are sampled and trained unpacked only")
    return in_format(model, dtype)  # transformers leaves some wider: routers of ERNIE 4.5


def _made_of(folder: str | Path, weights: dict[str, Tensor], dtype: str) -> PreTrainedModel:
    """Return the model of a folder's config with these weights."""
    with torch.random.fork_rng(devices=[]):
        # verl's config.json says bfloat16 whatever the weights are
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    tied = set(model.state_dict()) - dict(model.named_parameters()).keys()
    if wrong := [*(set(weights) ^ set(model.state_dict())) - tied]:
        raise ValueError(f"{wrong[0]} is not both in the weights and in the model")
    model.load_state_dict(weights, strict=False)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return in_format(model, dtype)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model, or its adapter, and its tokenizer, in the format that `transformers` loads."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = own
    write_generation(own, folder)
    tokenizer.save_pretrained(folder)
    share_weights(folder)


def write_generation(config: GenerationConfig, folder: str | Path) -> None:
    """Write how a model generates; transformers' own way refuses what many models come with, an unused temperature."""
    config.to_json_file(Path(folder) / "generation_config.json", keys_to_pop=["compile_config"])


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
    """Return an engine over a model, which leaves training mode, and knows the tokenizer's special tokens from then on.

    It samples `slots` sequences of at most `context` tokens at a time, from weights that are rounded to a format.
    """
    for config in (model.generation_config, model.config):
        # a list where replies end in several ways; a larger model's may be in its text's config alone
        own = getattr(config, "eos_token_id", None)
        if tokenizer.eos_token_id not in (None, *(own if isinstance(own, list) else [own])):
            config.eos_token_id = tokenizer.eos_token_id
        if tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id
    model.eval()
    return Engine(model, slots=slots, max_len=context, forward=forward_in(weights))
