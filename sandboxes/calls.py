"""A call on a sandbox: what it asks for, checked, and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.process import CallLimits

WORK = "/work"
"""The folder that code starts in; it can write there and in /tmp only. Relative paths are below it."""
DEFAULT_TIMEOUT = 30.0
MAX_OUTPUT = 64 * 1024
"""Bytes kept of each of stdout and stderr by default: half from the beginning, half from the end."""
MAX_FILE = 16 * 1024 * 1024
MAX_KEPT = 16 * 1024 * 1024
"""Bytes of each of stdout and stderr that a call may ask for, at most."""
NO_LIMITS = CallLimits()
_USER = re.compile("[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended."""

    returncode: int
    """Its exit status; -n if signal n ended it; 127 if there is no such program, 126 if it can't be run."""
    stdout: str
    stderr: str
    """Decoded as UTF-8; what isn't is escaped as `\\xNN`."""
    timed_out: bool = False
    truncated: bool = False
    """Whether the middle of an output was dropped."""
    seconds: float = 0.0
    sandbox_lost: bool = False
    """Whether the sandbox is gone, by what its code did: every further call only says so."""


@dataclass(frozen=True, slots=True)
class PythonResult:
    """How a piece of Python ended."""

    stdout: str
    stderr: str
    value: str | None = None
    """The `repr` of the last line if that is an expression; None if it isn't, or is None."""
    error: str | None = None
    """The traceback; None if nothing was raised."""
    timed_out: bool = False
    truncated: bool = False
    state_lost: bool = False
    """Whether the interpreter and its variables are gone: the next call begins with a new one.

    It may have died in this call, or before it: by itself, or killed in the wake of an earlier command.
    """
    seconds: float = 0.0
    sandbox_lost: bool = False
    """Whether the sandbox is gone, by what its code did: every further call only says so."""
    plots: tuple[bytes, ...] = ()
    """PNG files of the matplotlib figures that were open at its end: 4 and 1 MiB at most, of 4096 pixels a side."""


class FileAccessError(OSError):
    """A path in a sandbox that can't be read or written: it is missing, too large, or no regular file."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command; `Sandbox.exec` describes the fields."""

    argv: tuple[str, ...]
    input: bytes
    cwd: str
    env: Mapping[str, str]
    timeout: float
    max_output: int
    limits: CallLimits = NO_LIMITS
    user: str = ""


def check_argv(argv: Sequence[str]) -> None:
    """Check a command.

    Raises:
        ConfigError: if it is none.
    """
    if isinstance(argv, str) or not argv:
        raise ConfigError(f"argv={argv!r} is no command; give a list, such as ['ls', '-l']")


def check_user(user: str | None, refused: str | None) -> str:
    """Return the user of a call, "" for a sandbox's first one.

    Raises:
        ConfigError: if there can be none of that name, or, for the given reason, none at all.
    """
    if user is None:
        return ""
    if refused is not None:
        raise ConfigError(f"user={user!r}: {refused}")
    if user == "root" or not _USER.fullmatch(user):
        raise ConfigError(
            f"user={user!r}: give a name such as 'tests', which is not root, of at most 32 of a-z 0-9 _ -"
        )
    return user


def check_call(timeout: float, max_output: int) -> None:
    """Check the limits of a call.

    Raises:
        ConfigError: if one is out of range.
    """
    if not 0 < timeout <= 86400:
        raise ConfigError(f"timeout={timeout}; give a number of seconds, more than 0, at most a day")
    if not 0 <= max_output <= MAX_KEPT:
        raise ConfigError(f"max_output={max_output}; give 0 to {MAX_KEPT} bytes")
