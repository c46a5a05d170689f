"""What a tool's declaration limits: its options' values, how often it is called, and when again after a failure."""

from __future__ import annotations

import math
import re
from typing import Protocol

from agent_rl.errors import DefinitionError

DEFAULT_TIMEOUT = 30.0
FIRST_PAUSE = 0.5
"""Seconds before a failed call is made again; twice as many before each further time."""
MOST_PAUSE = 60.0
"""Seconds that a pause has at most, whatever a server asks for."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what OpenAI's API takes


class Declared(Protocol):
    """What a tool declares: see `tool`."""

    is_async: bool
    timeout: float | None
    inline: bool
    max_output: int
    retries: int
    retry_on: tuple[type[Exception], ...]


def check_options(tool: Declared, name: str, rate: float | None) -> None:
    """Check what a tool declares.

    Raises:
        DefinitionError: if an option makes no sense, or two contradict each other.
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise DefinitionError(f"tool '{name}': a name has 1 to 64 of A-Z a-z 0-9 _ -; give another: @tool(name=...)")
    if tool.inline and tool.is_async:
        raise DefinitionError(f"tool '{name}' is async and inline: drop inline=True, an async function needs no thread")
    if tool.inline and tool.timeout not in (None, DEFAULT_TIMEOUT):
        raise DefinitionError(
            f"tool '{name}' has timeout={tool.timeout} and inline=True: nothing can stop it; drop one"
        )
    if tool.inline and (tool.retries or rate is not None):
        raise DefinitionError(
            f"tool '{name}' is inline: with retries or a rate it would have to wait; drop inline=True"
        )
    if tool.timeout is not None and not (_is_number(tool.timeout) and tool.timeout > 0):
        raise DefinitionError(f"tool '{name}' has timeout={tool.timeout!r}; give a positive number of seconds, or None")
    if type(tool.max_output) is not int or tool.max_output < 1:
        raise DefinitionError(f"tool '{name}' has max_output={tool.max_output!r}; give a whole number of characters")
    if type(tool.retries) is not int or tool.retries < 0:
        raise DefinitionError(f"tool '{name}' has retries={tool.retries!r}; give a whole number from 0")
    for kind in tool.retry_on:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise DefinitionError(f"tool '{name}' has {kind!r} in retry_on; give a tuple of exception classes")
    if rate is not None and not (_is_number(rate) and 0 < rate < math.inf):
        raise DefinitionError(f"tool '{name}' has rate={rate!r}; give a positive number of calls per second, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pause(failures: int, error: Exception) -> float:
    """Return how many seconds to wait after an attempt that failed after so many others."""
    asked = getattr(error, "retry_after", None)
    wanted = asked if isinstance(asked, int | float) and asked >= 0 else FIRST_PAUSE * 2.0**failures
    return min(wanted, MOST_PAUSE)
