"""A model's folder in Hugging Face's format, loaded and put behind an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.engines.base import WeightFormat
from agent_rl.engines.embedded.device import device_of
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.quantization import forward_in
from agent_rl.engines.model_files import require_model
from agent_rl.errors import CheckpointError


def load_model(folder: str | Path, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a folder's model, in float32 on a device, and its tokenizer.

    Raises:
        CheckpointError: if the folder holds no model, or a damaged one.
        ConfigError: if this machine has no such device.
    """
    require_model(folder)
    place = device_of(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(place), AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # what its many readers raise about a file that is cut short or missing
        raise CheckpointError(
            f"the model in '{folder}' can't be loaded, {type(error).__name__}: {str(error)[:200]}; take another folder"
        ) from error


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
