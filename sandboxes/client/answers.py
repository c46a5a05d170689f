"""What an agent answers, as results."""

from __future__ import annotations

import functools
import logging
import re
import struct
from typing import cast

from agent_rl.sandboxes.agent.frames import Head
from agent_rl.sandboxes.calls import ExecResult, PythonResult
from agent_rl.sandboxes.client.reading import decode

_log = logging.getLogger(__name__)
_RESERVES = re.compile("(?i)(failed to|could not|cannot) reserve|error occurred during initialization of VM")
"""What programs say that reserve more address space than they use: V8, the JVM, Go."""
MAX_SIDE = 4096
"""Pixels of a plot's width or height, at most."""


async def exec_result(head: Head, body: bytes, seconds: float) -> ExecResult:
    """Return how a command ended, after so many seconds.

    Raises:
        KeyError: if the answer lacks something.
        TypeError: if it holds something else.
    """
    out, err = await text_pair(head, body)
    code = whole_number(head, "code")
    if code and _RESERVES.search(out[-2000:] + err[-2000:]):
        _tell_of_address_space()
    return ExecResult(code, out, err, head["expired"] is True, head["cut"] is True, seconds)


@functools.cache
def _tell_of_address_space() -> None:
    """Say, once, which limit such a program needs raised."""
    _log.warning(
        "a program in a sandbox could not reserve address space, of which each process of a local sandbox has as much "
        "as Limits.memory says (512 MiB by default): Node.js takes 700 MiB, Java 4 GiB; raise `limits`"
    )


async def python_result(head: Head, body: bytes, seconds: float) -> PythonResult:
    """Return how a piece of Python ended; raises as `exec_result` does."""
    out, err = await text_pair(head, body)
    return PythonResult(
        out,
        err,
        _text(head, "value"),
        _text(head, "error"),
        timed_out=head["expired"] is True,
        truncated=head["cut"] is True,
        state_lost=head["lost"] is True,
        seconds=seconds,
        plots=tuple(plot for plot in cast("list[bytes]", head["plots"]) if _is_png(plot)),
    )


def _is_png(data: bytes) -> bool:
    """Whether bytes say that they are a PNG file, and not of too many pixels for who decodes them."""
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or len(data) < 24:
        return False
    return all(0 < side <= MAX_SIDE for side in struct.unpack_from(">II", data, 16))


async def text_pair(head: Head, body: bytes) -> tuple[str, str]:
    """Return stdout and stderr as text; raises as `exec_result` does."""
    n = whole_number(head, "out")
    if not body:
        return "", ""
    return await decode(body[:n]), await decode(body[n:])


def whole_number(head: Head, key: str) -> int:
    """Return a number of an answer; raises as `exec_result` does."""
    value = head.get(key)
    if not isinstance(value, int):
        raise TypeError(f"{key}={value!r} is no number")
    return value


def _text(head: Head, key: str) -> str | None:
    value = head.get(key)
    return value if value is None else str(value)


def without_sandbox(end: Exception) -> PythonResult:
    """Return the result of code whose sandbox is gone."""
    return PythonResult("", "", error=f"{end}\n", state_lost=True, sandbox_lost=True)
