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
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from agent_rl.cli.commands import COMMANDS, Command
from agent_rl.cli.failure import describe
from agent_rl.errors import AgentRLError, ConfigError
from agent_rl.version import __version__

TRACEBACK = "--traceback"
"""An option of every command."""
UNREAD = 141
"""The status where nobody reads the output to its end, 128 + SIGPIPE, as shells have it of other programs."""


class _Parser(argparse.ArgumentParser):
    """Shows texts as they are written, and adds the rest of a command's description when its help is asked for."""

    def __init__(self, *, more: str = "", **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.more = more

    def format_help(self) -> str:
        more = _resolve(self.more) if self.more else ""
        self.description = f"{self.description}{more() if callable(more) else more}"
        return super().format_help()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C.

    It is 141 where the output's reader has ended, as of `agent-rl view FOLDER | head`.
    """
    # torch reads it when it is loaded: its threads then sleep while they wait, and leave the core to other work
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _fill_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that a terminal or file can't hold is no error
        sys.stdout.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if argv is None else argv)
    with_traceback = TRACEBACK in given
    arguments = _parse([word for word in given if word != TRACEBACK])
    if arguments.log_level:
        logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return _run(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return UNREAD
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        if isinstance(error.__context__, BrokenPipeError):  # rich turns one into a SystemExit
            return UNREAD
        if with_traceback:
            traceback.print_exception(error)
        resumes = any(word.startswith("resume=") for word in given)
        print(f"agent-rl: {describe(error, resumes=resumes)}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    for file in arguments.imports or ():
        _load(file)
    _require_stored([getattr(arguments, name) for name in arguments.stored])
    status: int = _resolve(arguments.command)(arguments)
    if sys.stdout:  # there is none where it was closed before the start
        sys.stdout.flush()
    return status


def _fill_closed_streams() -> None:
    """Put the null device where a standard stream was closed before the start; what is opened next would be there."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)  # which has ended


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line; settings may stand after options, too, where argparse takes none."""
    parser = make_parser()
    arguments, left = parser.parse_known_args(words)
    if left and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides += left
    return arguments


def _resolve(name: str) -> Any:
    """Import a function or a text of the command line, `module:name`."""
    return resolve_name(f"agent_rl.cli.{name}")


def _require_stored(paths: Sequence[str | None]) -> None:
    """Refuse episodes that are not there, before the command's module is imported."""
    from agent_rl.store.shards import existing_shards

    for path in filter(None, paths):
        existing_shards(path)


def _load(file: str) -> None:
    from agent_rl.gym.registry import load_once

    try:
        load_once(file)
    except (AgentRLError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"--import {file} raises {describe(error).splitlines()[0]}") from error


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = _Parser(prog="agent-rl", description="Train, run and read tool-using language-model agents.")
    parser.epilog = "agent-rl COMMAND --help has examples; after an error, --traceback shows where it came from"
    parser.add_argument("--version", action="version", version=__version__)
    imports = _Parser(add_help=False)
    for anywhere in (parser, imports):  # a command's own default would replace what stands before it
        anywhere.add_argument(
            "--log-level",
            choices=("debug", "info", "warning", "error"),
            default=argparse.SUPPRESS,
            help="show logs from this level on, on stderr",
        )
    imports.add_argument(
        "--import", dest="imports", action="append", metavar="FILE", help="a Python file that registers environments"
    )
    parser.set_defaults(imports=None, log_level=None)
    _add_commands(parser, COMMANDS, imports)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Command], imports: _Parser) -> None:
    """Add commands, and their actions; those that take files get the options of `imports`."""
    added = parser.add_subparsers(required=True)
    for name, command in commands.items():
        one = added.add_parser(
            name,
            aliases=command.aliases,
            parents=[imports] if command.imports else [],
            help=command.about,
            description=command.about,
            more=command.more,
            epilog="\n  ".join(("examples:", *command.examples)) if command.examples else None,
        )
        one.set_defaults(command=command.runs, stored=command.stored)
        command.arguments(one)
        if command.actions:
            _add_commands(one, command.actions, imports)
    added.metavar = " | ".join(added.choices)
