"""The settings of a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_rl.config import parse_setting


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings of a command line; `--import` adds to `imports`."""
    settings = dict(map(parse_setting, arguments.overrides))
    named = settings.get("imports", [])
    files = [*(named if isinstance(named, list) else [named]), *(arguments.imports or ())]
    return settings | ({"imports": [str(Path(str(file)).resolve()) for file in files]} if files else {})
