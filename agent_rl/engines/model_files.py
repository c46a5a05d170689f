"""What a model's folder must hold, in Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path

from agent_rl.errors import CheckpointError


def require_model(folder: str | Path) -> None:
    """Check that a folder holds a model.

    Raises:
        CheckpointError: if it has no config.json, or one that can't be read.
    """
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
