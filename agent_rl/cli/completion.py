"""`agent-rl completion`: a script for a shell, from the parser and the settings as they are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pkgutil import resolve_name

from agent_rl.cli.parser import make_parser
from agent_rl.config import choices, setting_names
from agent_rl.gym.registry import env_ids

SCRIPT = """\
# agent-rl: source <(agent-rl completion {shell})
{setup}_agent_rl() {{
  local line="${{COMP_LINE:0:$COMP_POINT}}" words=""
  local current="${{line##* }}" rest="${{line#* }}"
  case "${{rest%% *}}" in
{cases}
  esac
  case "$rest" in *" "*) ;; *) words="{commands}" ;; esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  case "$current" in
    *=*) case "$COMP_WORDBREAKS" in *=*) COMPREPLY=("${{COMPREPLY[@]#*=}}") ;; esac ;;
  esac
  case "${{COMPREPLY[*]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _agent_rl agent-rl
"""


SETTINGS = {
    "train": "agent_rl.backends.embedded.config:TrainConfig",
    "rollout": "agent_rl.runs.rollout:RolloutSettings",
    "check": "agent_rl.cli.check:JudgedCheckSettings",
    "play": "agent_rl.runs.play:PlaySettings",
    "judge": "agent_rl.cli.judge:JudgeSettings",
    "replay": "agent_rl.runs.fork:ForkSettings",
}
"""The classes of commands' settings, imported when they are completed."""


def print_completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    setup = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" if arguments.shell == "zsh" else ""
    commands = subcommands(make_parser())
    cases = "\n".join(f'    {name}) words="{" ".join(_words(name, parser))}" ;;' for name, parser in commands.items())
    print(SCRIPT.format(shell=arguments.shell, setup=setup, cases=cases, commands=" ".join(commands)), end="")
    return 0


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser, by name."""
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: command for names in found for name, command in names.items()}


def _words(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if not action.option_strings and action.choices is not None:
            yield from map(str, action.choices)
    for inner in subcommands(parser).values():
        yield from (option for action in inner._actions for option in action.option_strings)
    if name in SETTINGS:
        yield from (f"{key}=" for key in setting_names(resolve_name(SETTINGS[name])))
    if name in ("train", "rollout", "check", "play"):
        yield from (env if name in ("check", "play") else f"env={env}" for env in env_ids())
    if name == "train":
        yield from (f"algorithm={preset}" for preset in choices("algorithm"))
