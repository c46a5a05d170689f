"""Folders of sandboxes without a mount namespace, marked by the process that uses them."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..agent.process_tree import started

PREFIX = "agent-rl-box-"
WORK, TMP = "work", "tmp"
PYTHON = "python"
"""The folder, beside the working folder, of the interpreter's name: `python3` is what runs here, whatever else is."""


def _mark(pid: int) -> str | None:
    """Return a name for a process that no later one has; None if there is no such process."""
    try:
        return f"{pid}.{started(pid)}"
    except OSError:
        return None


MARK = _mark(os.getpid()) or f"{os.getpid()}.0"
"""This process's."""


def alive(mark: str) -> bool:
    """Whether the process with this mark runs; an invalid mark counts as running."""
    pid = mark.partition(".")[0]
    return not pid.isdigit() or _mark(int(pid)) == mark


def make(slot: int, uid: int) -> Path:
    """Make a sandbox's folders, for a user."""
    home = Path(_parent(), f"{PREFIX}{MARK}-{slot}")
    home.mkdir()
    home.chmod(0o700 if uid == os.geteuid() else 0o711)  # it stays this user's, so that the next zygote can tell
    for folder in (home / WORK, home / TMP):
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(folder, uid, uid)
    name_python(home)
    return home


def name_python(folder: Path) -> None:
    """Make `PYTHON` in a folder, and in it the link that programs find the interpreter by."""
    names = folder / PYTHON
    names.mkdir()
    names.chmod(0o755)
    (names / "python3").symlink_to(sys.executable)


def remove(homes: Sequence[Path]) -> None:
    """Begin to remove the folders of sandboxes, however many files are there, however deep and however forbidding.

    Raises:
        OSError: if no process can be started.
    """
    # by programs, as they take no recursion: code can nest folders deeper than Python's stack
    script = 'chmod -R u+rwx -- "$@"; exec rm -rf --one-file-system -- "$@"'
    if homes:
        removal = os.posix_spawnp(
            "sh",
            ["sh", "-c", script, "sh", *map(str, homes)],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)],
            setsid=True,  # it outlives the zygote
        )
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, removal, 19)  # a small image may have no `nice`


def collect() -> None:
    """Begin to remove the folders of zygotes that are gone."""
    found = filter(_is_own, _parent().glob(f"{PREFIX}*-*"))
    with contextlib.suppress(OSError):  # else the next zygote's
        remove([home for home in found if not alive(home.name.removeprefix(PREFIX).rpartition("-")[0])])


def _is_own(home: Path) -> bool:
    try:
        return home.lstat().st_uid == os.getuid()
    except OSError:  # another process of ours removes it
        return False


def _parent() -> Path:
    """Return the folder for temporary files, which sandboxes have not: forks would find it in this cache."""
    folder = Path(tempfile.gettempdir())
    tempfile.tempdir = None
    return folder
