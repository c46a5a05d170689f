"""What the fuzzers draw from: bytes with mistakes in them, values that nobody expects, paths that nobody would give."""

from __future__ import annotations

import random
import struct
from typing import Any

VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, float("nan"), float("inf"), "", "x" * 99)
VALUES += ([], {}, [[]], [-1], [2**40], ["x"], {"id": 1}, "\ud800", "\x1b[2J", "9" * 5000, [0] * 999, "\0")
TOKENS: tuple[bytes, ...] = (b"{", b"}", b"[" * 99, b"]", b'"', b"\\", b"\\ud800", b"\0", b"\xff", b"NaN", b"-1")
TOKENS += (b"1e999", b"9" * 5000, b",")
LENGTHS = (0, 1, 7, 255, 65535, 65536, 65537, 2**26, 2**31 - 1, 2**31, 2**32 - 1)
PARTS: tuple[str, ...] = ("a", "..", ".", "", "/", "~", "*", "\n", "\t", " ", "\x1b[31m", "\udcff", "\ud800", "\u202e")
PARTS += ("é", "x" * 255, "x" * 256, "proc", "self", "fd", "0", "1", "3", "mem", "root", "dev", "stdin", "work", "tmp")
PARTS += ("-rf", "--", "\\")


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Return bytes with up to four mistakes in them."""
    found = bytearray(data)
    for _ in range(draw.randrange(5)):
        at, kind = draw.randrange(len(found) + 1), draw.randrange(7)
        end = min(len(found), at + draw.choice((1, 2, 9, 99)))
        if kind == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at:end]
        elif kind == 2:
            found[at:at] = found[at:end] * draw.choice((1, 2, 50))
        elif kind == 3:
            found[at:at] = draw.choice(TOKENS)
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            found[at:end] = draw.randbytes(end - at)
        elif len(found) >= 8:
            struct.pack_into(">I", found, draw.choice((0, 4)), draw.choice(LENGTHS))
    return bytes(found)


def path(draw: random.Random) -> str:
    """Return a path that nobody would give."""
    return draw.choice(("/", "")).join(
        draw.choice(PARTS) + draw.choice(("/", "", "")) for _ in range(draw.randrange(9))
    )
