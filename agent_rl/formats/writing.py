"""Formats that episodes are written in, by name."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, images_in, without_nan
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.formats.atif import atif_rows
from agent_rl.formats.inspect_log import write_inspect
from agent_rl.formats.rows import message_rows, preference_rows, sft_rows
from agent_rl.formats.tables import write_dataset, write_parquet
from agent_rl.rollout.watch import is_gone

Rows = Callable[[Iterable[Episode]], Iterator[dict[str, JSON]]]
LINES: Mapping[str, Rows] = MappingProxyType(
    {"openai": message_rows, "sft": sft_rows, "preferences": preference_rows, "atif": atif_rows}
)
"""Formats of JSON lines."""
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "openai": "JSON lines of chat messages in OpenAI's format",
        "sft": "JSON lines of token ids with their loss mask and labels; messages where there are no ids",
        "preferences": "JSON lines of prompt, chosen and rejected: the best and the worst sample of each group",
        "atif": "JSON lines of trajectories in Harbor's format; one file each where the path is no .jsonl",
        "parquet": "a Parquet file, a row an episode",
        "dataset": "a folder of Hugging Face's datasets, for load_from_disk",
        "inspect": "a log of inspect_ai, for inspect view",
    }
)

TEXT_ONLY = ("atif", "parquet", "dataset")
"""Formats without a place for images, as they are written here."""


def export_episodes(episodes: Iterable[Episode], path: str | os.PathLike[str], format: str) -> int:
    """Write episodes in another system's format; return how many rows were written.

    Args:
        episodes: read one at a time; Parquet, datasets and inspect_ai's logs hold more of them in memory.
        path: a new file, or a new folder for "dataset" and for "atif" where it does not end in .jsonl.
        format: one of FORMATS.

    Raises:
        ConfigError: if there is no such format, its library is missing, something is there already, or an episode shows
            images that it has no place for.
    """
    target = Path(path)
    if format not in FORMATS:
        raise ConfigError(f"no format '{format}'.{did_you_mean(format, FORMATS)} There are: {', '.join(FORMATS)}")
    if target.exists():
        raise ConfigError(f"{target} is there already: name another, or remove it")
    if format in TEXT_ONLY:
        episodes = _without_images(episodes, format)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".exporting-{socket.gethostname()}-"
    for left in target.parent.glob(f"{prefix}*"):  # of exports that were killed
        pid, _, name = left.name.removeprefix(prefix).partition("-")
        if name == target.name and pid.isdecimal() and is_gone(int(pid)):
            _remove(left)
    part = target.with_name(f"{prefix}{os.getpid()}-{target.name}")  # whole or not there
    try:
        written = _write(episodes, part, format)
        part.rename(target)
    finally:
        _remove(part)
    return written


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _write(episodes: Iterable[Episode], path: Path, format: str) -> int:
    if format == "atif" and path.suffix != ".jsonl":
        return _write_files(atif_rows(episodes), path)
    if format in LINES:
        return _write_lines(LINES[format](episodes), path)
    return {"parquet": write_parquet, "dataset": write_dataset, "inspect": write_inspect}[format](episodes, path)


def _without_images(episodes: Iterable[Episode], format: str) -> Iterator[Episode]:
    for episode in episodes:
        if shown := images_in(episode.messages):
            others = ", ".join(name for name in FORMATS if name not in TEXT_ONLY)
            raise ConfigError(
                f"episode {episode.id} of {episode.env} shows {shown[0]}, and --to {format} has no place for images: "
                f"choose one of {others}"
            )
        yield episode


def _write_lines(rows: Iterable[Mapping[str, JSON]], file: Path) -> int:
    written = 0
    with file.open("x", encoding="utf-8") as lines:
        for written, row in enumerate(rows, start=1):  # noqa: B007  # the last number is the count
            lines.write(_dumped(row) + "\n")
    return written


def _write_files(rows: Iterable[Mapping[str, JSON]], folder: Path) -> int:
    folder.mkdir()
    written = 0
    for written, row in enumerate(rows, start=1):
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in str(row["session_id"]))[:100]
        (folder / f"{written:06d}-{safe}.json").write_text(_dumped(row), encoding="utf-8")
    return written


def _dumped(row: Mapping[str, JSON]) -> str:
    return json.dumps(without_nan(row), ensure_ascii=False, default=str).encode(errors="replace").decode()
