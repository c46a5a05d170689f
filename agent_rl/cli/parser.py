"""The parser of the command line, and `main`, which runs a command.

A command's module is imported when the command runs: a mistyped one is refused at once.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from agent_rl.cli.arguments import (
    add_difference,
    add_export,
    add_import,
    add_judge_actions,
    add_listing,
    add_replay_actions,
    add_sandbox_server,
    add_selection,
    add_server,
    add_statistics,
)
from agent_rl.cli.failure import describe
from agent_rl.errors import AgentRLError, ConfigError
from agent_rl.version import __version__

EXAMPLES = {  # of the commands whose description has none
    "init": ("agent-rl init my-env",),
    "envs": ("agent-rl envs", "agent-rl envs --import my_envs.py"),
    "algorithms": ("agent-rl algorithms", "agent-rl algorithms --import my_parts.py"),
    "stats": (
        "agent-rl stats runs/latest",
        "agent-rl stats runs/latest --where 'step>=15' --departures",
        "agent-rl stats runs/20261122-101500-rollout runs/20261122-103000-rollout",
        "agent-rl stats runs/one runs/other --where purpose=eval --where step=100 --by level",
    ),
    "diff": (
        "agent-rl diff runs/latest train-00003-001-04 train-00003-001-05",
        "agent-rl diff runs/one eval-00100-greedy-0000 --other runs/other",
    ),
    "import": (
        "agent-rl import conversations.jsonl -o imported/episodes.jsonl",
        "agent-rl import jobs/2026-02-09 --from atif -o imported/episodes.jsonl --env swe-v0",
    ),
    "doctor": ("agent-rl doctor backend=verl", "agent-rl doctor backend=verl hardware=gpu_8x80gb start_from=MODEL"),
    "serve": ("agent-rl serve search-v0 sql-v0", "agent-rl serve --import shop.py shop-v0 --port 9000 --capacity 256"),
    "runs": ("agent-rl runs", "agent-rl runs /data/runs --json"),
    "sandbox": ("agent-rl sandbox doctor", "agent-rl sandbox serve --port 8001 --capacity 64"),
}
TRACEBACK = "--traceback"
"""An option of every command."""


class _Parser(argparse.ArgumentParser):
    """Adds a command's settings to its help when it is asked for."""

    settings = ""
    """The name of the function that returns them."""

    def format_help(self) -> str:
        self.description = f"{self.description or ''}{_resolve(self.settings)() if self.settings else ''}"
        return super().format_help()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C."""
    # torch reads it when it is loaded: its threads then sleep while they wait, and leave the core to other work
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that a terminal or file can't hold is no error
        sys.stdout.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if argv is None else argv)
    with_traceback = TRACEBACK in given
    arguments = _parse([word for word in given if word != TRACEBACK])
    if level := getattr(arguments, "log_level", None):
        logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        for file in getattr(arguments, "imports", None) or []:
            _load(file)
        _require_stored([getattr(arguments, name) for name in getattr(arguments, "stored", ())])
        status: int = _resolve(arguments.command)(arguments)
        if sys.stdout:  # there is none where it was closed before the start
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # as of `agent-rl view FOLDER | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 1
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        if isinstance(error.__context__, BrokenPipeError):  # rich turns one into a SystemExit
            return 1
        if with_traceback:
            traceback.print_exception(error)
        print(f"agent-rl: {describe(error)}", file=sys.stderr)
        return 1


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line; settings may stand after options, too, where argparse takes none."""
    parser = _parser()
    arguments, left = parser.parse_known_args(words)
    if left and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides += left
    return arguments


def _resolve(name: str) -> Callable[..., Any]:
    """Import a function of the command line, `module:function`."""
    return cast(Callable[..., Any], resolve_name(f"agent_rl.cli.{name}"))


def _require_stored(paths: Sequence[str | None]) -> None:
    """Refuse episodes that are not there, before the command's module is imported."""
    from agent_rl.store.shards import existing_shards

    for path in filter(None, paths):
        existing_shards(path)


def _load(file: str) -> None:
    from agent_rl.gym.registry import load_once

    try:
        load_once(str(Path(file).resolve()))
    except (AgentRLError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"--import {file} raises {describe(error).splitlines()[0]}") from error


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="agent-rl", description="Train, run and read tool-using language-model agents.", formatter_class=raw
    )
    parser.epilog = "agent-rl COMMAND --help has examples; after an error, --traceback shows where it came from"
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        parser_class=_Parser,
        required=True,
    )
    imports = _Parser(add_help=False)
    levels = ("debug", "info", "warning", "error")
    for anywhere in (parser, imports):  # a command's own default would replace what stands before it
        anywhere.add_argument(
            "--log-level",
            choices=levels,
            default=argparse.SUPPRESS,
            help="show logs from this level on, on stderr",
        )
    imports.add_argument(
        "--import", dest="imports", action="append", metavar="FILE", help="a Python file that registers environments"
    )

    def add(name: str, command: str, text: str, *, description: str | None = None, settings: str = "") -> _Parser:
        added = commands.add_parser(name, parents=[imports], help=text, description=description, formatter_class=raw)
        added.set_defaults(command=command)
        if settings:
            added.add_argument("overrides", nargs="*", metavar="key=value", help=settings)
        return added

    listed = add("envs", "listing:list_envs", "list the registered environments")
    listed.add_argument("namespace", nargs="?", help="list those of another package only")
    about = "find what is wrong with an environment, and what policies without skill score in it, without a model"
    checked = add("check", "check:check", about, description=about)
    checked.add_argument("env", help="the id of a registered environment")
    checked.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    checked.add_argument("--json", action="store_true", help="print the report as JSON")
    checked.settings = "check:check_help"
    about = "play environments for clients elsewhere: env=http://HOST:PORT/NAME there"
    served = add("serve", "serve:serve", about)
    add_server(served)
    about = "train a model on an environment; by default a small one: warm start, then reinforcement learning"
    trained = add("train", "training:train", about, description=about, settings="settings; backend=verl; resume=FOLDER")
    trained.settings = "training:train_help"
    for option, text in {
        "--config": "print every setting and its meaning; train nothing",
        "--explain": "print the algorithm's formula; train nothing",
        "--dry-run": "check the settings and the environment, print the full config; train nothing",
    }.items():
        trained.add_argument(option, action="store_true", help=text)
    trained.add_argument("--status", metavar="FOLDER", help="say what a run in FOLDER is doing, from another terminal")
    about = "run episodes without training, print them as a table, and store them"
    played = add("rollout", "episodes:rollout", about, description=about, settings="settings; resume=FILE")
    played.settings = "episodes:rollout_help"
    played.add_argument("--status", metavar="FILE", help="say what a rollout into FILE is doing, from another terminal")
    about = "play an environment yourself, in the terminal; the episode is stored as a demonstration"
    person = add("play", "play:play", about, description=about)
    person.add_argument("env", help="the id of a registered environment")
    person.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    person.settings = "play:play_help"
    about = "talk to a model in the terminal; with an environment's tools, which really run, if one is given"
    talking = add("chat", "chat:talk", about, description=about)
    talking.add_argument(
        "checkpoint", help="a run's or a model's folder, a file or name of a model, or a policy's name"
    )
    talking.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    talking.add_argument("--tokens", action="store_true", help="print the ids of each reply, with log-probabilities")
    talking.settings = "chat:chat_help"
    about = "say what Ray's cluster lacks for a run: doctor backend=verl hardware=NAME"
    add("doctor", "training:doctor", about, settings="settings, as of train")
    about = "list the algorithms and the parts that they are made of, with formulas"
    add("algorithms", "listing:list_algorithms", about)
    about = "list the runs of a folder: how far they are, their success, episodes and size"
    of_runs = commands.add_parser("runs", help=about, description=about)
    of_runs.add_argument("folder", nargs="?", default="runs", help="runs by default")
    of_runs.add_argument("--json", action="store_true", help="print a line of JSON for each")
    of_runs.set_defaults(command="runs:print_runs")
    listing = commands.add_parser("episodes", help="list stored episodes that fit", formatter_class=raw)
    add_listing(listing)
    listing.set_defaults(command="view:list_episodes", stored=("file",))
    listing.settings = "view:episodes_help"
    reading = commands.add_parser("view", help="read stored episodes", formatter_class=raw)
    add_selection(reading)
    reading.set_defaults(command="view:view")
    reading.settings = "view:view_help"
    about = "show a run in numbers, and what went wrong in it; or compare two, by the tasks that both played"
    counting = commands.add_parser("stats", aliases=("compare",), help=about, description=about)
    add_statistics(counting)
    counting.set_defaults(command="stats:stats", stored=("first", "second"))
    about = "compare two episodes, to the first differing token and side by side; exit status 1 if they differ"
    differing = commands.add_parser("diff", help=about, description=about)
    add_difference(differing)
    differing.set_defaults(command="diff:diff", stored=("file",))
    about = "play stored episodes again: verify them, or continue one from any of its turns"
    replaying = commands.add_parser("replay", help=about, description=about)
    replays = replaying.add_subparsers(parser_class=_Parser, required=True, metavar="verify | fork")
    add_replay_actions(replays.add_parser, imports)
    about = "write stored episodes in another system's format, or a checkpoint's model for other tools"
    exporting = commands.add_parser("export", help=about, description=about, formatter_class=raw)
    add_export(exporting)
    exporting.set_defaults(command="export:export")
    exporting.settings = "export:export_help"
    about = "read conversations of other systems as episodes, to judge, view and compare them"
    importing = commands.add_parser("import", help=about, description=about, formatter_class=raw)
    add_import(importing)
    importing.set_defaults(command="formats:import_")
    about = "judge stored episodes under rubrics, and measure judges"
    judging = commands.add_parser("judge", help=about, description=about)
    add_judge_actions(
        judging.add_subparsers(
            parser_class=_Parser,
            required=True,
            metavar="run | estimate | report | apply | compare | agree | probe | lint",
        )
    )
    about = "write a small project: an environment, tasks, settings and a test, ready to train on"
    project = commands.add_parser("init", help=about, description=about)
    project.add_argument("folder", help="a new folder; its name is the environment's, as in my-env")
    project.set_defaults(command="project.init:init")
    about = "print a script that completes commands: source <(agent-rl completion bash)"
    completing = commands.add_parser("completion", help=about, description=about)
    completing.add_argument("shell", choices=["bash", "zsh"])
    completing.set_defaults(command="completion:print_completion", parser=parser)
    sandbox = commands.add_parser("sandbox", help="look after the places where model-written code runs")
    actions = sandbox.add_subparsers(required=True, metavar="doctor | build-image | serve")
    sandboxes = actions.add_parser(
        "doctor", help="say what sandboxes guarantee on this machine, and what to do about it"
    )
    sandboxes.set_defaults(command="sandbox:sandbox_doctor")
    image = actions.add_parser("build-image", help="make Docker's base image of this interpreter, offline")
    image.add_argument("--tag", help="the image's name; the one that the docker sandbox takes by default")
    image.set_defaults(command="sandbox:build_image")
    about = "open sandboxes for clients elsewhere: env_args.sandbox=remote there"
    served = actions.add_parser("serve", parents=[imports], help=about, description=about)
    add_sandbox_server(served)
    served.set_defaults(command="sandbox:serve_sandboxes")
    commands.metavar = " | ".join(commands.choices)
    for name, lines in EXAMPLES.items():
        commands.choices[name].epilog = "\n  ".join(("examples:", *lines))
        commands.choices[name].formatter_class = raw
    return parser
