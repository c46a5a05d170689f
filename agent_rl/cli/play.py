"""`agent-rl play`: a person plays an environment in the terminal."""

from __future__ import annotations

import argparse

from rich.console import Console

from agent_rl.cli.config_text import list_settings
from agent_rl.cli.settings import settings_of
from agent_rl.config import load_config
from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.runs.commands import command
from agent_rl.runs.play import PlaySettings
from agent_rl.runs.play import play as run_play
from agent_rl.view.conversation import clean
from agent_rl.view.person import HELP, Person
from agent_rl.view.text import folded_clean, print_message

PLAY_EXAMPLES = f"""
at the prompt:
{HELP}

examples:
  agent-rl play search-v0
  agent-rl play sql-v0 split=eval n=5 out=demonstrations.jsonl      five tasks that the file has not
  agent-rl train env=sql-v0 warm_start.episodes=demonstrations.jsonl"""


def play_help() -> str:
    """Return the settings and what can be typed, for `--help`."""
    return f"\n\nsettings:\n{list_settings(PlaySettings(env='ENV'), without={'env'})}\n{PLAY_EXAMPLES}"


def play(arguments: argparse.Namespace) -> int:
    """Let a person play; show and store what comes of it."""
    settings = load_config(None, PlaySettings, settings={"env": arguments.env, **settings_of(arguments)})
    person, played = Person(), list[Episode]()

    def show(episode: Episode) -> None:
        played.append(episode)
        _show_end(episode, person.console)

    try:
        file = run_play(settings, person, person.say, show)
    except KeyboardInterrupt:
        print("\nDropped." if not played else f"\nDropped; {len(played)} before it are stored.")
        return 130
    if not played:
        print("Nothing was played, so nothing is stored.")
        return 0
    print(f"{plural(len(played), 'episode')} in {file}; read them: {command('view', str(file))}")
    return 0


def _show_end(episode: Episode, console: Console) -> None:
    """Print what the environment said at the end, and the rewards."""
    at = max(i for i, message in enumerate(episode.messages) if message.role == "assistant")
    for message in episode.messages[at + 1 :]:
        print_message(message, console, folded_clean)
    earned = ", ".join(f"{r.name} {'not scored' if r.value is None else f'{r.value:.4g}'}" for r in episode.rewards)
    reward = "not scored" if episode.reward is None else f"{episode.reward:.4g}"
    turns = plural(episode.turns, "turn")
    problem = f"; {episode.error.type}: {episode.error.message}" if episode.error else ""
    console.print(
        clean(f"{episode.ending}, {episode.stop_reason} after {turns}: reward {reward} ({earned}){problem}"),
        style="bold", markup=False, highlight=False,
    )  # fmt: skip
