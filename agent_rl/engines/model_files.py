"""What a model's folder must hold, in Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path

from agent_rl.errors import CheckpointError

ADAPTER, BASE = "adapter_config.json", "base"
"""The file that says what an adapter was trained on, and the folder beside the checkpoint that may hold it."""


def base_model(folder: str | Path) -> str | None:
    """Return the folder or name of the model that a folder's adapter was trained on; None if it holds no adapter.

    Raises:
        CheckpointError: if it doesn't say so, or that folder is gone.
    """
    file = Path(folder) / ADAPTER
    if not file.exists():
        return None
    try:
        name = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: it names no base_model_name_or_path; take another one") from error
    moved = Path(folder).resolve().parent / BASE
    if Path(name).is_absolute() and not Path(name).exists():
        if not moved.exists():
            raise CheckpointError(
                f"the adapter in '{folder}' was trained on '{name}', which is gone: put that model back, or its new "
                f"place into base_model_name_or_path in {file}"
            )
        return str(moved)
    return name


def require_model(folder: str | Path) -> None:
    """Check that a folder holds a model, or an adapter and that model that it was trained on.

    Raises:
        CheckpointError: if it has no config.json, or one that can't be read.
    """
    if (base := base_model(folder)) is not None:
        folder = base
    file = Path(folder) / "config.json"
    if not file.exists():
        raise CheckpointError(
            f"no model in '{folder}': it has no config.json; give the folder of a run's checkpoint or of a "
            "model in Hugging Face's format (a name there is not downloaded: fetch it with `hf download`)"
        )
    try:
        is_config = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except ValueError:
        is_config = False
    if not is_config:
        raise CheckpointError(f"{file} is damaged: it is no JSON object; take another checkpoint")
