"""What untrusted bytes may cost the host's event loop: how often they wake it up, and how long they take to decode."""

from __future__ import annotations

import asyncio
import codecs
from weakref import WeakKeyDictionary

PAUSE = 0.002
"""Seconds for which nothing is read after too many small reads, or decoded after a piece of what is no UTF-8."""
FREE_READS = 32
FAIR_READ = 4096
"""Bytes: who writes as many at a time is never paused."""
PIECE = 4096
"""Bytes that are no UTF-8 and are decoded at a time: about 0.5 ms."""

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class ReadBudget:
    """Reads that a connection has left before it is paused: bytes one by one would wake the event loop for each."""

    def __init__(self) -> None:
        self._left = FREE_READS

    def is_spent(self, size: int) -> bool:
        """Count a read of so many bytes; return whether the next one should wait for `PAUSE`."""
        self._left = min(FREE_READS, self._left - 1 + size // FAIR_READ)
        if self._left > 0:
            return False
        self._left = 1
        return True

    def renew(self) -> None:
        """Begin another call."""
        self._left = FREE_READS


async def decode(data: bytes) -> str:
    r"""Return bytes as UTF-8 text, with `\xNN` for what is none; other tasks have their turns meanwhile.

    An escape takes 0.13 µs, and a call's output may be nothing else. So long ones are decoded piece by piece, of one
    call at a time: a fifth of the event loop's time, however many there are.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    if len(data) <= PIECE:
        return data.decode(errors="backslashreplace")
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    pieces = []
    async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        for start in range(0, len(data), PIECE):
            pieces.append(decoder.decode(data[start : start + PIECE], final=start + PIECE >= len(data)))
            await asyncio.sleep(PAUSE)
    return "".join(pieces)
