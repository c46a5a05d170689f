"""The folder of a run: runs/<time>-<name>, and runs/latest, which points at the newest."""

from __future__ import annotations

import os
import time
from pathlib import Path

from agent_rl.errors import ConfigError


def new_folder(runs_dir: str, name: str) -> Path:
    """Make a run's folder and point `latest` at it.

    Raises:
        ConfigError: if the name can't be a folder's.
    """
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"name={name!r} can't be a folder's name: use letters, digits, '-', '_' and '.'")
    runs = Path(runs_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        folder = runs / (f"{stamp}-{name}" if not attempt else f"{stamp}-{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        link = runs / f".latest-{os.getpid()}"
        link.symlink_to(folder.name)
        link.replace(runs / "latest")
        return folder
    raise ConfigError(f"no free folder name below {runs}/{stamp}-{name}")
