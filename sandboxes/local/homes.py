"""Folders of sandboxes without a mount namespace, marked by the process that uses them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from ..agent.process_tree import started

PREFIX = "agent-rl-box-"
WORK, TMP = "work", "tmp"


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
    home = Path(tempfile.gettempdir(), f"{PREFIX}{MARK}-{slot}")
    for folder in (home, home / WORK, home / TMP):
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(folder, uid, uid)
    return home


def remove(home: Path) -> None:
    """Remove a sandbox's folders, however deep and however forbidding."""
    # by programs that take no recursion: code can nest folders deeper than Python's stack
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf", "--one-file-system"]):
        subprocess.run([*command, "--", str(home)], stderr=subprocess.DEVNULL, check=False)


def collect() -> None:
    """Remove the folders of zygotes that are gone."""
    for home in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        if not alive(home.name.removeprefix(PREFIX).rpartition("-")[0]) and home.stat().st_uid == os.getuid():
            remove(home)
