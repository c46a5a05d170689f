"""`agent-rl replay fork`: continue a stored episode from one of its turns."""

from __future__ import annotations

import argparse

from rich.console import Console

from agent_rl.cli.config_text import list_settings
from agent_rl.cli.settings import settings_of
from agent_rl.config import load_config
from agent_rl.core.display import plural
from agent_rl.errors import ReplayError
from agent_rl.runs.commands import command
from agent_rl.runs.fork import HUMAN, ForkResult, ForkSettings, start_fork
from agent_rl.store.heads import Head
from agent_rl.view.conversation import clean
from agent_rl.view.progress import Progress, Screen
from agent_rl.view.text import print_episode, print_table, short_id

FORK_EXAMPLES = """
policies: as of agent-rl rollout; policy=human asks you at the prompt.

examples:
  agent-rl replay fork runs/latest train-00010-003-00 --at-turn 2 policy=runs/latest n=8
  agent-rl replay fork runs/20261122-101500-rollout 4f1c --at-turn 1 policy=openai policy.model=gpt-5-mini
  agent-rl replay fork runs/20261122-101500-rollout 4f1c --at-turn 4 budget.turns=16   one that a budget ended
  agent-rl replay fork runs/latest train-00010-003-00 --at-turn 2 policy=human"""


def fork_help() -> str:
    """Return the settings of a fork and examples, for `--help`."""
    return f"\n\nsettings:\n{list_settings(load_config(None, ForkSettings))}\n{FORK_EXAMPLES}"


def fork(arguments: argparse.Namespace) -> int:
    """Continue an episode from a turn; show and store what comes of it."""
    settings = load_config(None, ForkSettings, settings=settings_of(arguments))
    asks = settings.policy.name == HUMAN  # where a display is in the way
    try:
        with Progress(Screen(quiet=True) if asks else None) as progress:
            forked = start_fork(arguments.file, arguments.id, arguments.at_turn, settings, progress)
    except ReplayError as error:
        raise ReplayError(clean(str(error))) from error
    _report(forked, arguments.at_turn)
    return 0


def _report(forked: ForkResult, at_turn: int) -> None:
    console, parent = Console(), forked.parent
    if not forked.episodes:
        print("Nothing was played, so nothing is stored.")
        return
    first, *others = forked.episodes
    if others:
        print_table(map(Head.of, forked.episodes), console)
    else:
        print_episode(first, console)
    if any(len(episode.trajectories) for episode in forked.episodes):
        kept = "those of its parent, exactly" if forked.keeps_tokens else "rendered from its messages"
        print(f"The tokens before turn {at_turn}: {kept}.")
    view = command("view", str(forked.file), short_id(first.id))
    count = plural(len(forked.episodes), "fork")
    print(f"{count} of {clean(short_id(parent.id))} at turn {at_turn} in {forked.file}; read one: {view}")
