"""`agent-rl export`: episodes in other systems' formats, or a checkpoint's model in Hugging Face's."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.store.shards import existing_shards

_OF_EPISODES, _OF_MODELS = ("where", "search", "limit"), ("merge", "dtype")
"""Options that have a meaning for one of both."""


def export(arguments: argparse.Namespace) -> int:
    """Write the episodes that fit, or a model.

    Raises:
        ConfigError: if it is not said where to, or an option has no meaning for what is exported.
    """
    if arguments.out and arguments.target:
        raise ConfigError(f"export to {arguments.target} or to {arguments.out}? Give one path")
    unread = _OF_EPISODES if arguments.to is None else _OF_MODELS
    if given := [f"--{name}" for name in unread if getattr(arguments, name)]:
        way_out = "say with --to which format episodes get" if arguments.to is None else "leave out --to for a model"
        raise ConfigError(f"{', '.join(given)} would not be read: {way_out}")
    target = arguments.out or arguments.target
    if target is None:
        raise ConfigError("export where to? Give a path after --out")
    if arguments.to is not None:
        existing_shards(arguments.file)
        from agent_rl.cli.formats import export_stored

        return export_stored(arguments, target)
    from agent_rl.engines.embedded.export import export_model

    folder = _model_in(Path(arguments.file))
    size = export_model(folder, target, merged=arguments.merge, dtype=arguments.dtype or "float32")
    print(f"{target}: the model of {folder}, {size / 1e6:,.0f} MB")
    return 0


def _model_in(path: Path) -> Path:
    """Return a model's folder: of a run on either backend, or of one of verl's checkpoints, the one in it."""
    if (path / "actor" / "huggingface").is_dir():
        return path / "actor" / "huggingface"
    if (path / "config.yaml").is_file():
        from agent_rl.backends.run import Run

        return Run(path).checkpoint
    return path
