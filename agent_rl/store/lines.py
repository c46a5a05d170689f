"""Files of lines that only grow: one writer at a time, each line whole or not there, healed after a crash."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from agent_rl.errors import StoreError
from agent_rl.store.tail import heal


class LineWriter:
    """Appends lines to one file; at most one writer a file, any number of threads.

    Each line is one `write`, so a reader beside it never sees half of one, save at the very end.
    """

    def __init__(self, path: Path) -> None:
        """Open the file (and make it where it is new), lock it, and move a torn tail aside.

        Raises:
            StoreError: if another writer has the file open.
        """
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = open_locked(path)
        try:
            heal(self._fd, path)
        except BaseException:
            self.close()
            raise

    def write_line(self, line: bytes) -> None:
        """Append one line, newline included; it outlives this process from here on, and the machine after `flush`.

        Raises:
            StoreError: if the writer is closed.
            OSError: if the disk refuses; the file is then as it was.
        """
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                error.filename = error.filename or str(self.path)
                raise

    def flush(self) -> None:
        """Wait until everything written so far is on the disk itself."""
        with self._lock:
            os.fsync(self._open_fd())

    def close(self) -> None:
        """Give the file back; more than once is fine."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        append(self._open_fd(), line)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StoreError(f"the writer of {self.path} is closed; open another {type(self).__name__} to append")
        return self._fd


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each whole line with its number, from 1; the unterminated last line of a torn file is left out."""
    with file.open("rb") as handle:
        for at, line in enumerate(handle, start=1):
            if not line.endswith(b"\n"):
                return
            yield at, line


def open_locked(path: Path, *, make: bool = True, wait: bool = False) -> int:
    """Open a file to append to, for this process alone.

    Args:
        path: the file.
        make: whether to make it where it is not there.
        wait: whether to wait for another that has it open.

    Raises:
        StoreError: if another writer has it open.
        FileNotFoundError: if it is not there, and not to be made.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if make else 0), 0o644)
        try:
            _lock_file(fd, path, wait)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its writer has closed it as a shard, and the file of this name is another


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk itself."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def has_writer(path: Path) -> bool:
    """Return whether a process has a file open to append to, as far as this system can tell."""
    try:
        import fcntl

        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for as long as it takes to close it
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        pass
    return False


def _lock_file(fd: int, path: Path, wait: bool) -> None:
    try:
        import fcntl  # not above: everything else of this module works on Windows
    except ImportError as error:
        raise StoreError(
            f"{path} can't be written here: it would have to be locked, which takes a POSIX system (Linux, macOS, WSL)"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise StoreError(f"another writer has {path} open; close it, or give this run its own directory") from error


def append(fd: int, line: bytes) -> None:
    """Write all bytes to the end of a file, or none; what was written of them is truncated away."""
    start = os.fstat(fd).st_size
    try:
        rest = memoryview(line)
        while rest:  # the kernel may take less than all of it, near a full disk or on a signal
            rest = rest[os.write(fd, rest) :]
    except BaseException:
        os.ftruncate(fd, start)
        raise
