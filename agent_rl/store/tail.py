"""The end of a file of lines: what a kill leaves torn is moved into a file beside it."""

from __future__ import annotations

import os
import warnings
from itertools import count
from pathlib import Path

_CHUNK = 1 << 20


def heal(fd: int, path: Path) -> None:
    """Move an unterminated last line aside, so that the next line begins a line; warn of it.

    Args:
        fd: the file, open for reading and writing, and locked or not written by others.
        path: its path; the line goes to `<path>.torn-1`, or the next number.
    """
    size = os.fstat(fd).st_size
    end = _end_of_last_line(fd, size)
    if end < size:
        aside = cut(fd, path, end, "torn")
        warnings.warn(
            f"{path} ended in a torn line of {size - end} bytes, as a kill leaves; it was moved to {aside}",
            stacklevel=3,
        )


def cut(fd: int, path: Path, size: int, reason: str) -> Path:
    """Cut a file to a size; move what is cut off into a new file `<path>.<reason>-<n>`, and return its path."""
    names = (Path(f"{path}.{reason}-{n}") for n in count(1))
    aside = next(name for name in names if not name.exists())
    with aside.open("xb") as rest:
        end = os.fstat(fd).st_size
        for at in range(size, end, _CHUNK):
            rest.write(os.pread(fd, min(_CHUNK, end - at), at))
        rest.flush()
        os.fsync(rest.fileno())
    os.ftruncate(fd, size)
    return aside


def _end_of_last_line(fd: int, size: int) -> int:
    stop = size
    while stop > 0:
        start = max(0, stop - _CHUNK)
        newline = os.pread(fd, stop - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0
