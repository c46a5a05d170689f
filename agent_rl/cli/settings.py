"""The settings of a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_rl.config import parse_setting
from agent_rl.errors import ConfigError


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings of a command line, after those of `config=FILE`; `--import` adds to `imports`."""
    settings = dict(map(parse_setting, arguments.overrides))
    if (file := settings.pop("config", None)) is not None:
        settings = read_settings(Path(str(file))) | settings
    named = settings.get("imports") or []
    files = [*(named if isinstance(named, list) else [named]), *(arguments.imports or ())]
    return settings | ({"imports": [str(Path(str(file)).resolve()) for file in files]} if files else {})


def read_settings(file: Path) -> dict[str, object]:
    """Return the settings of a YAML file; its `imports` lie beside it.

    Raises:
        ConfigError: if it can't be read.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        settings = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"config={file} can't be read: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"config={file} has no settings: write KEY: VALUE lines, as `agent-rl train --config` does")
    imports = settings.get("imports") or []
    beside = [str(file.parent / str(name)) for name in (imports if isinstance(imports, list) else [imports])]
    return {str(key): value for key, value in settings.items()} | ({"imports": beside} if beside else {})
