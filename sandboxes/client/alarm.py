"""An alarm for an answer that does not come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

STALL = 0.5
"""Seconds by which an alarm is late if the host's event loop stood still: then the answer may be there, unread."""


def set_alarm(
    answer: asyncio.Future[Any], timeout: float, more: float, miss: Callable[[], None]
) -> asyncio.TimerHandle:
    """Call `miss` if an answer is not there after so many seconds; not while the host's event loop is what is late.

    Args:
        answer: what is waited for.
        timeout: seconds.
        more: seconds until it is looked at again where the loop was late.
        miss: gives up.
    """
    loop = answer.get_loop()
    return loop.call_later(timeout, _look, answer, loop.time() + timeout, more, miss)


def _look(answer: asyncio.Future[Any], due: float, more: float, miss: Callable[[], None]) -> None:
    """Do so, or look again; no closure, whose cycle would keep the answer until the garbage collector comes."""
    loop = answer.get_loop()
    if answer.done():
        return
    if loop.time() > due + STALL:
        loop.call_later(more, _look, answer, loop.time() + more, more, miss)
    else:
        miss()
