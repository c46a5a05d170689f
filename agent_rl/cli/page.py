"""`agent-rl view --html` and `--serve`: a run as one self-contained page, or as a page that follows it."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import webbrowser
from pathlib import Path

from agent_rl.core.display import plural
from agent_rl.errors import ConfigError
from agent_rl.serving.frames import TOKEN
from agent_rl.store.shards import shards_of
from agent_rl.store.where import quoted
from agent_rl.view.page.build import MOST, save_page
from agent_rl.view.page.serve import PageSettings, serving_page


def view_page(arguments: argparse.Namespace) -> int:
    """Write the page and print what is in it.

    Raises:
        StoreError: if there is no such file or episode, or a line can't be read.
        ConfigError: if no episode fits, or a filter has no meaning.
    """
    asked = {name: getattr(arguments, name) for name in ("search", "sort", "reverse", "offset")}
    where = [*arguments.where, *([f"id={quoted(arguments.id + '*')}"] if arguments.id else [])]
    limit = MOST if arguments.limit is None else arguments.limit
    chosen = save_page(arguments.file, arguments.html, where=where, limit=limit, **asked)
    size, held = Path(arguments.html).stat().st_size, len(chosen.places)
    print(f"{arguments.html}: {held:,} of {plural(chosen.total, 'episode')}, {size / 1000:,.0f} kB")
    if left := chosen.fitting - held - arguments.offset:
        print(f"{left:,} more fit: choose with --where, --limit and --offset")
    if arguments.open:
        webbrowser.open(Path(arguments.html).resolve().as_uri())
    return 0


def serve_page(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM; a run that is not there yet is waited for.

    Raises:
        ConfigError: if it is a folder of runs, or the address can't be used.
    """
    path = Path(arguments.file)
    if path.is_dir() and not shards_of(path) and (runs := [run for run in sorted(path.iterdir()) if shards_of(run)]):
        raise ConfigError(f"{path} holds {plural(len(runs), 'run')}: serve one of them, such as {runs[-1]}")
    settings = PageSettings(arguments.host, arguments.port, os.environ.get(TOKEN, ""))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with serving_page(path, settings) as url:
        print(f"{path} is at {url}{f'?token=, and {TOKEN}' if settings.token else ''}", flush=True)
        print(f"Ctrl-C ends it{'' if path.exists() else f'; {path} is not there yet'}", flush=True)
        if arguments.open:
            webbrowser.open(f"{url}?token={settings.token}" if settings.token else url)
        ended.wait()
    return 0
