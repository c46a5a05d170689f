"""A model's folder in Hugging Face's format, loaded and put behind an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.quantization import WeightFormat, forward_in
from agent_rl.errors import CheckpointError


def require_model(folder: str | Path) -> None:
    """Raise CheckpointError unless a folder holds a model."""
    if not (Path(folder) / "config.json").exists():
        raise CheckpointError(f"no model in '{folder}': it has no config.json; give a folder that a run wrote")


def load_model(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a folder's model, in float32, and its tokenizer.

    Raises:
        CheckpointError: if the folder holds no model.
    """
    require_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


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
