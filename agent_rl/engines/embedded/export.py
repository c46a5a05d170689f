"""Export: a checkpoint as a model's folder that plain transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent_rl.engines.embedded.model_folder import in_format, load_model, save_model
from agent_rl.engines.model_files import base_model, written
from agent_rl.errors import ConfigError


def export_model(folder: str | Path, out: str | Path, *, merged: bool, dtype: str) -> int:
    """Write a checkpoint's model, tokenizer, chat template and generation config; return how many bytes that takes.

    Args:
        folder: in Hugging Face's format, or that of an adapter of `peft`.
        out: a new folder; it is whole or not there.
        merged: whether an adapter is added to the weights that it was trained on, in float32, and rounded after that.
        dtype: the format of the written weights.

    Raises:
        CheckpointError: if the folder holds no model, or a damaged one, or `out` can't be written.
        ConfigError: if `out` is there, or an adapter is neither merged nor in a folder of its own.
    """
    out = Path(out)
    if out.exists():
        raise ConfigError(f"{out} is there already: name a new folder")
    if not merged and base_model(folder) is not None and dtype != "float32":
        raise ConfigError(f"{folder} holds an adapter, which is in float32: leave out --dtype, or add --merge")
    model, tokenizer = load_model(folder, merged=merged)
    part = out.with_name(f".exporting-{out.name}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with written(part, "{mend}, or name another folder"):
            save_model(in_format(model, dtype), tokenizer, part)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sum(file.stat().st_size for file in out.iterdir())
