"""`agent-rl export --to` and `agent-rl import`: episodes in other systems' formats."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent_rl.core.display import plural
from agent_rl.errors import ConfigError
from agent_rl.formats.reading import import_episodes
from agent_rl.formats.writing import FORMATS, export_episodes
from agent_rl.runs.commands import command
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.selection import episode_ids, select
from agent_rl.store.shards import episode_file, refuse_device

EXAMPLES = """
examples:
  agent-rl export runs/latest --to sft --where success=yes -o sft.jsonl
  agent-rl export runs/latest --to preferences --where purpose=train -o pairs.jsonl
  agent-rl export runs/latest --to atif -o trajectories
  agent-rl export runs/latest/checkpoint my-model --merge --dtype bfloat16      the model, not its episodes"""
_UNFAILED = "outcome!=failed"


def formats_help() -> str:
    """Return the formats and examples, for `--help`."""
    formats = "\n".join(f"  {name:12s} {text}" for name, text in FORMATS.items())
    return f"\n\nformats:\n{formats}\n{EXAMPLES}"


def export_stored(arguments: argparse.Namespace, out: str) -> int:
    """Write the episodes that fit."""
    where = arguments.where or [_UNFAILED]
    limit = 2**62 if arguments.limit is None else arguments.limit
    selected = select(arguments.file, where=where, search=arguments.search, limit=limit)
    if not selected.places:
        asked = f" {' and '.join(where)}" if selected.total else ""
        raise ConfigError(f"{arguments.file}: {selected.none}{asked}")
    rows = export_episodes(selected.episodes(), out, arguments.to)
    if not rows:
        Path(out).unlink(missing_ok=True)
        wanted = f"{arguments.to}: {FORMATS[arguments.to]}"
        raise ConfigError(f"none of {plural(len(selected.places), 'episode')} makes a row of {wanted}")
    print(f"{plural(rows, 'row')} of {plural(len(selected.places), 'episode')} in {out}")
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Store conversations as episodes."""
    file = episode_file(arguments.out)
    refuse_device(file)
    if stored := len(episode_ids(arguments.out)):
        raise ConfigError(f"{arguments.out} has {plural(stored, 'episode')} already: name another file")
    part, count = file.with_name(f".importing-{file.stem}.jsonl"), 0  # whole or not there: in one piece, however large
    try:
        with EpisodeWriter(part, shard_bytes=sys.maxsize) as writer:
            for episode in import_episodes(arguments.file, arguments.format, env=arguments.env):
                writer.write(episode)
                count += 1
        if not count:
            raise ConfigError(f"{arguments.file} holds no episodes: {file} is not written")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    print(f"{plural(count, 'episode')} in {file}; read them: {command('view', str(file))}")
    return 0
