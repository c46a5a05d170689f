"""Snapshots of sandboxes: their files, and the calls by which another sandbox's interpreter gets the same variables.

    snapshot = await sandbox.snapshot()
    other = await sandboxes.open()
    missing = await other.restore(snapshot)

The files are exact. The interpreter is not copied: its calls are made again, and each has to give what it gave. So code
that shows what depends on the time or on chance has files only, and `restore` says so, as it does where files are open;
a number that was drawn and not shown is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

MAX_FILES = 16 * 1024 * 1024
"""Bytes of a sandbox's files, packed, at most."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a sandbox, to be made again."""

    method: str
    """Its name, as in `Sandbox`."""
    arguments: Mapping[str, object]
    outcome: str
    """A digest of what Python gave; of other calls, whose effects are files, empty."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sandbox at one moment: plain data, that can be pickled, and restored more than once."""

    files: bytes
    """All of the folders that code can write, as `agent.workplace` packs them."""
    calls: tuple[Call, ...] = ()
    """What led to the interpreter's variables, since the sandbox was opened."""
    has_variables: bool = False
    """Whether the interpreter has run anything."""
    gap: str | None = None
    """Why its calls can't be repeated, if so."""
    has_processes: bool = False
    """Whether a process was started that outlives a call."""

    @property
    def digest(self) -> str:
        """A hash of the files' contents, names, modes and times."""
        return hashlib.sha256(self.files).hexdigest()
