"""`agent-rl view` and `agent-rl episodes`: the episodes of a run, as a table or one in full."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.errors import ConfigError
from agent_rl.runs.commands import command
from agent_rl.store.selection import Selection, find_episode, select
from agent_rl.store.token_records import token_records
from agent_rl.store.where import FLAGS, NUMBERS, TEXTS, quoted
from agent_rl.view.conversation import clean
from agent_rl.view.decoding import load_decoder
from agent_rl.view.group import print_group
from agent_rl.view.text import print_episode, print_table, short_id

ROWS = 20
"""The rows of the table where no --limit is given."""
SAMPLES = 1000
"""Of a group that are shown at most."""
FIELDS = f"""\
fields of --where and --sort:
  numbers:   {", ".join(NUMBERS)}
  texts:     {", ".join(TEXTS[:7])},
             {", ".join(TEXTS[7:])}
  yes or no: {", ".join(FLAGS)}
  of a task, or a reward's component: task.KEY, rewards.NAME"""
PAGER = "On a terminal, long output goes through $PAGER (less); PAGER=cat turns that off."
HELP = f"""

{FIELDS}

examples:
  agent-rl view runs/latest                                    the first 20
  agent-rl view runs/latest --where 'reward<0.5' --where stop=turns
  agent-rl view runs/latest --where purpose=train --sort step --reverse --limit 50
  agent-rl view runs/latest --search "no such item" --offset 20
  agent-rl view runs/latest eval-00100-sampled-0000 --tokens   one, with the tokens that were sampled
  agent-rl view runs/latest train-00003-001-04 --turn 2        one, from a turn on
  agent-rl view runs/latest train-00010-003-02 --tokens advantage   what an update made of each of them
  agent-rl view runs --tui                                     browse runs, episodes, turns and tokens by keys
  agent-rl view runs/latest --group train-00010-003            samples of one task side by side
  agent-rl view runs/latest --follow --where 'reward<0.5'      new episodes as lines, until the run ends
  agent-rl view runs/latest --html run.html                    one page with everything, for any browser
  agent-rl view runs/latest --serve --open                     the same page, which follows the run

{PAGER}"""


EPISODES_HELP = f"""

{FIELDS}

examples:
  agent-rl episodes runs/latest --where 'reward < 0.5 and env == "search-v0"' --sort reward
  agent-rl episodes runs/latest --where 'stop in (turns, tokens) and not (success=yes or task.level>3)'
  agent-rl episodes runs/latest --where purpose=eval --sort rewards.correct --reverse --limit 50
  agent-rl episodes runs/latest --where 'ending!=ok' --json > failed.jsonl
  agent-rl episodes runs/latest --search "no such item" --count

{PAGER}"""


def view(arguments: argparse.Namespace) -> int:
    """Print what the arguments ask for.

    Raises:
        StoreError: if there is no such file or episode, or a line can't be read.
        ConfigError: if no episode fits, or a filter has no meaning.
    """
    if arguments.html is not None or arguments.serve:
        from agent_rl.cli.page import serve_page, view_page

        return serve_page(arguments) if arguments.serve else view_page(arguments)
    if arguments.tui:
        return _browse(arguments)
    if arguments.follow:
        from agent_rl.cli.follow import follow

        return follow(arguments)
    file = arguments.file
    if arguments.group is not None:
        samples = _group(file, arguments.group)
        with paged() as console:
            print_group(samples, console, full=arguments.full)
        return 0
    if arguments.id is not None:
        _print_one(find_episode(file, arguments.id), arguments)
        return 0
    selected = _selected(arguments)
    if selected.fitting == 1 and selected.places:
        (only,) = selected.episodes()
        _print_one(only, arguments)
    else:
        _print_table(selected, arguments)
    return 0


def list_episodes(arguments: argparse.Namespace) -> int:
    """Print the episodes that fit: `agent-rl episodes`.

    Raises:
        StoreError: if there is no such file, or a line can't be read.
        ConfigError: if no episode fits, or a filter has no meaning.
    """
    if arguments.count:
        print(select(arguments.file, where=arguments.where, search=arguments.search, limit=0).fitting)
    elif arguments.json:
        for head in _selected(arguments, sys.maxsize, may_be_empty=True).heads():
            print(json.dumps({name: getattr(head, name) for name in head.__slots__}))
    else:
        _print_table(_selected(arguments), arguments)
    return 0


def _selected(arguments: argparse.Namespace, most: int = ROWS, *, may_be_empty: bool = False) -> Selection:
    """Return the episodes that the arguments ask for, `most` of them where they don't say how many."""
    asked = {name: getattr(arguments, name) for name in ("where", "search", "sort", "reverse", "offset")}
    selected = select(arguments.file, limit=most if arguments.limit is None else arguments.limit, **asked)
    if not selected.fitting and not may_be_empty:
        raise ConfigError(f"{arguments.file}: {selected.none}")
    return selected


def _print_table(selected: Selection, arguments: argparse.Namespace) -> None:
    with paged() as console:
        print_table(selected.heads(), console, arguments.sort)
        for line in _summary(arguments.file, selected, arguments.offset):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _browse(arguments: argparse.Namespace) -> int:
    try:
        from agent_rl.view.tui.app import browse
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise ConfigError(f"--tui needs {missing}: pip install 'agent-rl[tui]'") from error
    browse(arguments.file, " and ".join(arguments.where), arguments.search)
    return 0


def _group(file: str, id: str) -> list[Episode]:
    """Return the episodes of a group, named by its id or an episode's."""
    found = select(file, where=[f"group={quoted(id)}"], limit=SAMPLES)
    if not found.fitting:
        return _group(file, find_episode(file, id).group_id)
    return list(found.episodes())


def _print_one(episode: Episode, arguments: argparse.Namespace) -> None:
    file, mode = arguments.file, arguments.tokens
    decode, records = (load_decoder(file), token_records(file, episode.id)) if mode else (None, [])
    with paged() as console:
        print_episode(
            episode,
            console,
            tokens=mode,
            records=records,
            decode=decode,
            full=arguments.full,
            first_turn=arguments.turn,
        )


def _summary(asked: str, selected: Selection, offset: int) -> Iterator[str]:
    """Yield how much the table leaves out and the command for one episode."""
    first, last = offset + 1, offset + len(selected.places)
    fitting = f"{selected.fitting:,} that fit, of " if selected.fitting < selected.total else ""
    of = f"{fitting}{plural(selected.total, 'episode')}"
    shown = f"{first:,} to {last:,}" if last >= first else "none"
    yield f"{shown} of {of}" + (f"; more: --offset {last}" if first <= last < selected.fitting else "")
    for id in selected.ids[:1]:
        yield f"One in full: {command('view', asked, clean(short_id(id)))}"


@contextmanager
def paged() -> Iterator[Console]:
    """Give a console; what is printed on a terminal goes through the user's pager, in colour."""
    console = Console()
    if not console.is_terminal:
        yield console
        return
    os.environ.setdefault("LESS", "FRX")  # as git: colours, and no pager for what fits on the screen
    with console.pager(styles=True):
        yield console
