"""The end of a file of lines: what a kill leaves torn is moved into a file beside it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
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
        aside = set_aside(path, "torn", _chunks(fd, end, size))
        os.ftruncate(fd, end)
        warnings.warn(
            f"{path} ended in a torn line of {size - end} bytes, as a kill leaves; it was moved to {aside}",
            stacklevel=3,
        )


def set_aside(path: Path, reason: str, parts: Iterable[bytes]) -> Path:
    """Write what is cut off a file into a new one, `<path>.<reason>-<n>`; return its path when it is on the disk.

    Raises:
        OSError: if the disk refuses; nothing of the new file stays, as it would fill a full disk further each time.
    """
    names = (Path(f"{path}.{reason}-{n}") for n in count(1))
    aside = next(name for name in names if not name.exists())
    try:
        with aside.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(aside)
        raise
    return aside


def _chunks(fd: int, start: int, stop: int) -> Iterator[bytes]:
    return (os.pread(fd, min(_CHUNK, stop - at), at) for at in range(start, stop, _CHUNK))


def _end_of_last_line(fd: int, size: int) -> int:
    stop = size
    while stop > 0:
        start = max(0, stop - _CHUNK)
        newline = os.pread(fd, stop - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0
