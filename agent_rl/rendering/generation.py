"""The ids that end a text by a model's own generation_config.json, which lies beside its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "generation_config.json"


def text_ends(model: str) -> frozenset[int]:
    """Return the ids of a model's folder, or of its name on Hugging Face's hub; none where nothing says them."""
    file = Path(model) / NAME if Path(model).is_dir() else _on_hub(model)
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file is not None else None
    except (OSError, ValueError, AttributeError):  # whoever loads the model says what is wrong with its files
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found or ())


def _on_hub(model: str) -> Path | None:
    """Return the file as transformers keeps it, downloaded if it is not there; None if it can't be had."""
    from transformers.utils import cached_file

    try:
        found = cached_file(model, NAME)
    except (OSError, ValueError):  # no such model or file, or no network
        return None
    return Path(found) if found else None
