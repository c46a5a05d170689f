"""`agent-rl view --follow`: each new episode as a line, while a run or a rollout writes them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.core.turns import opening_question
from agent_rl.rollout.watch import is_under_way
from agent_rl.runs.folder import SUMMARY, status_of
from agent_rl.store.episodes import episode_at
from agent_rl.store.index import open_index
from agent_rl.store.shards import episode_file, shards_of
from agent_rl.store.where import parse_where
from agent_rl.view.conversation import clean
from agent_rl.view.text import reward_text, short_id

PAUSE = 0.5
"""Seconds between two looks."""
STALE = 60.0
"""Seconds after which a run that said what it does every two seconds is taken to be killed."""


def follow(arguments: argparse.Namespace) -> int:
    """Print each new episode that fits, until the run ends or Ctrl-C.

    Raises:
        ConfigError: if a condition has no meaning.
        StoreError: if the episodes are gone, or a line can't be read.
    """
    console, notes = Console(), Console(stderr=True)
    path, shown = Path(arguments.file), 0
    parse_where(arguments.where)
    notes.print(Text(f"Following {path}; Ctrl-C ends this.", style="dim"))
    try:
        for episode in new_episodes(path, arguments.where, lambda: time.sleep(PAUSE)):
            shown += 1
            print_line(episode, console)
        said = "The run has ended"
    except KeyboardInterrupt:
        said = "Stopped"
    notes.print(Text(f"{said}; {plural(shown, 'new episode')}{' that fit' * bool(arguments.where)}.", style="dim"))
    return 0


def new_episodes(path: Path, where: Sequence[str], pause: Callable[[], object]) -> Iterator[Episode]:
    """Yield the episodes that fit as they are written, by any writer, until the run ends.

    Those that are there at the beginning are left out; a run may begin later.

    Args:
        path: an episode file or a run's folder.
        where: expressions, all of which must hold.
        pause: is called between two looks.
    """
    fits, was_there = parse_where(where), bool(shards_of(path))
    while not shards_of(path):
        pause()
    path = path.resolve()  # runs/latest may be another run soon
    known, was_alive, total = dict[str, int](), False, -1
    with open_index(path) as index:
        while True:
            alive = is_under_way(status_of(path), STALE)
            ended = not alive and (was_alive or _has_results(path))  # before the look, which is then the last
            was_alive = was_alive or alive
            index.update()
            if index.total != total:
                places = [place for place, _ in index.places(fits)]
                new = [place for place in places if place.offset > known.get(place.shard, -1)]
                known |= {place.shard: place.offset for place in places}
                if total >= 0 or not was_there:
                    yield from (episode_at(path, place) for place in new)
                total = index.total
            if ended:
                return
            pause()


def print_line(episode: Episode, console: Console) -> None:
    """Print an episode as one line, cut to a terminal's width."""
    errors = sum(episode.tool_errors.values())
    line = Text(f"{clean(short_id(episode.id)):20s} ")
    reward = reward_text(episode)
    line.append(" " * max(0, 10 - len(reward))).append(reward)
    line.append(f"  {episode.stop_reason:10s}", style="" if episode.trainable else "red")
    line.append(f"{plural(episode.turns, 'turn'):>10} {plural(episode.tool_calls, 'call'):>10} ")
    line.append(f"{plural(errors, 'error'):>10}", style="red" if errors else "dim")
    line.append(f"  {clean(opening_question(episode))}", style="dim")
    is_cut = console.is_terminal
    console.print(line, no_wrap=is_cut, overflow="ellipsis" if is_cut else "ignore", crop=is_cut, soft_wrap=not is_cut)


def _has_results(path: Path) -> bool:
    """Return whether the run has ended, and written what came of it behind its last episode."""
    file = episode_file(path)
    for results in (file.with_name(SUMMARY), file.with_suffix(".results.json")):
        try:
            return results.stat().st_mtime_ns >= file.stat().st_mtime_ns
        except OSError:
            pass
    return False
