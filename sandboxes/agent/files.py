"""Files in and out of a sandbox, by a process of their own in it, which is as confined as foreign code is.

Path traversal is harmless: a symlink leads to nothing that foreign code could not reach, and a slow path slows down a
process with a timeout.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .frames import CHUNK, write_all

WORK = "/work"


class NotAFileError(OSError):
    """What a path leads to is no regular file, or too large."""


def locate(path: str, home: str) -> str:
    """Return the absolute path: relative ones are below `home`, and so is `WORK` where there is no such folder."""
    if home != WORK and (path == WORK or path.startswith(WORK + "/")):
        path = path[len(WORK) :].lstrip("/")
    return str(Path(home, path))


def send(path: str, limit: int) -> None:
    """Write a regular file of at most `limit` bytes to stdout."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # a fifo would block, a terminal attach itself
    size = _regular(fd, path).st_size
    if size > limit:
        raise NotAFileError(f"{path} has {size} bytes; at most {limit} are read")
    while size > 0 and (data := os.read(fd, min(CHUNK, size))):  # no further, though it grows meanwhile
        write_all(1, data)
        size -= len(data)


def receive(path: str) -> None:
    """Write stdin to a regular file, and make the folders above it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    _regular(fd, path)
    os.ftruncate(fd, 0)
    while data := os.read(0, CHUNK):
        write_all(fd, data)


def _regular(fd: int, path: str) -> os.stat_result:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(f"{path} is not a regular file")
    return status
