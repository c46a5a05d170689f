"""The ids that end a text by a model's own generation_config.json, which lies beside its tokenizer or in its base."""

from __future__ import annotations

import json
from pathlib import Path

from agent_rl.engines.model_files import base_model

NAME = "generation_config.json"
TIMEOUT = 10.0
"""Seconds that the hub has to answer."""


def text_ends(model: str) -> frozenset[int]:
    """Return the ids of a model's folder, or of its name on Hugging Face's hub; none where nothing says them.

    An adapter's folder that holds none has those of the model that it was trained on.
    """
    if not model:
        return frozenset()
    file = Path(model) / NAME if Path(model).is_dir() else _on_hub(model)
    try:
        if file is not None and not file.exists() and (base := base_model(model)) is not None:
            return text_ends(base)
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file is not None else None
    except (OSError, ValueError, AttributeError):  # whoever loads the model says what is wrong with its files
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found or ())


def _on_hub(model: str) -> Path | None:
    """Return the file as the hub's client keeps it, downloaded if it is not there; None if it can't be had."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        known = try_to_load_from_cache(model, NAME)
        if known is not None:
            return Path(known) if isinstance(known, str) else None  # else the hub has said that there is none
        get_hf_file_metadata(hf_hub_url(model, NAME), timeout=TIMEOUT)  # without the five retries of a download
        return Path(hf_hub_download(model, NAME))
    except Exception:  # of the hub's client, of HTTP and of the network
        return None
