"""The runs of a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable

from agent_rl.core.display import plural
from agent_rl.store.shards import shards_of
from agent_rl.view.conversation import clean
from agent_rl.view.tui.base import Level, table_of
from agent_rl.view.tui.episodes import EpisodesScreen


def run_folders(path: Path) -> list[Path]:
    """Return the folders in a folder that hold episodes, the newest first."""
    if not path.is_dir():
        return []
    found = [Path(entry.path) for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    return sorted((folder for folder in found if shards_of(folder)), key=_written, reverse=True)


class RunsScreen(Level):
    """A row a run."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._folders = run_folders(path)

    def body(self) -> ComposeResult:
        """Lay out the table."""
        table = table_of("run", "size", "last written")
        for folder in self._folders:
            size = sum(shard.path.stat().st_size for shard in shards_of(folder)) / 1e6
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(_written(folder)))
            table.add_row(Text(clean(folder.name)), Text(f"{size:.1f} MB", justify="right"), Text(written))
        yield table

    def on_mount(self) -> None:
        """Say how many there are."""
        self.note(plural(len(self._folders), "run"))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open a run."""
        self.app.push_screen(EpisodesScreen(self._folders[event.cursor_row]))


def _written(folder: Path) -> float:
    return max(shard.path.stat().st_mtime for shard in shards_of(folder))
