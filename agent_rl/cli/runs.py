"""`agent-rl runs`: the runs of a folder at a glance."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.core.display import plural
from agent_rl.runs.listing import ListedRun, list_runs
from agent_rl.view.conversation import clean
from agent_rl.view.tables import print_whole

STYLES = {"running": "green", "finished": "", "stopped": "yellow"}


def print_runs(arguments: argparse.Namespace) -> int:
    """Print a line for each run.

    Raises:
        StoreError: if there is no such folder.
    """
    runs = list_runs(arguments.folder)
    if arguments.json:
        for run in runs:
            print(json.dumps(asdict(run)))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "env", "what", "state", "step", "success", "episodes", "judged", "size", "changed"):
        table.add_column(title, justify="left" if title in ("run", "env", "what", "state") else "right", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(clean(Path(run.folder).name)),
            Text(clean(run.env)),
            Text(clean(run.what)),
            Text(run.state, style=STYLES[run.state]),
            "" if run.step is None else f"{run.step}/{run.steps}",
            _success(run),
            "many" if run.episodes is None else f"{run.episodes:,}",
            str(run.judged or ""),
            f"{run.bytes / 1e6:.1f} MB",
            f"{_age(time.time() - run.changed)} ago",
        )
    if runs:
        print_whole(table, Console())
    print(f"{plural(len(runs), 'run')} in {arguments.folder}")
    return 0


def _success(run: ListedRun) -> str:
    shown = [f"{value:.0%}" for value in (run.before, run.success) if value is not None]
    return " to ".join(shown)


def _age(seconds: float) -> str:
    age = timedelta(seconds=max(0, seconds))
    minutes = age.seconds // 60
    return f"{age.days} days" if age.days else f"{minutes // 60} h" if minutes >= 60 else f"{minutes} min"
