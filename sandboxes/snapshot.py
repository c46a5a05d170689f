"""Snapshots of sandboxes: their files, and the calls by which another sandbox's interpreter gets the same variables.

    snapshot = await sandbox.snapshot()
    other = await sandboxes.open()
    missing = await other.restore(snapshot)

The files are exact. The interpreter is not copied: its calls are made again, and each has to give what it gave. So code
whose results depend on the time or on chance has files only, and `restore` says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent_rl.sandboxes.base import Limits, PythonResult, Sandbox, Sandboxes

MAX_FILES = 16 * 1024 * 1024
"""Bytes of a sandbox's files, packed, at most."""
MAX_CALLS = 256
MAX_RECORDED = 4 * 1024 * 1024
"""Bytes of code, commands and written files that are kept to be repeated, at most."""
MAX_SECONDS = 60.0
"""Seconds that the recorded calls took together, at most."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


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


class Journal:
    """What a sandbox was asked for, as far as its interpreter can be brought back by it."""

    def __init__(self) -> None:
        self.calls: tuple[Call, ...] = ()
        self.has_variables = self.has_processes = False
        self.gap: str | None = None
        self._size, self._seconds = 0, 0.0
        self._files = b""

    def add(self, call: Call, size: int, seconds: float) -> None:
        """Record a call of so many bytes that came to its end, if by an error of its code, after so many seconds."""
        self._size += size
        self._seconds += seconds
        if self.gap is None and (
            len(self.calls) >= MAX_CALLS or self._size > MAX_RECORDED or self._seconds > MAX_SECONDS
        ):
            self.break_off("there were too many calls, or too long ones, to be repeated")
        if self.gap is None:
            self.calls = (*self.calls, call)
        self.has_variables = self.has_variables or call.method == "run_python"

    def break_off(self, reason: str) -> None:
        """Give up: what the interpreter holds can't be had by repeating calls."""
        self.calls, self.gap = (), self.gap or reason

    def lose_variables(self) -> None:
        """Forget what the interpreter ran: it is gone."""
        self.calls = tuple(call for call in self.calls if call.method != "run_python")
        self.has_variables = False

    def taken(self, files: bytes) -> Snapshot:
        """Return a snapshot with these files; equal ones are kept once."""
        self._files = self._files if self._files == files else files
        return Snapshot(self._files, self.calls, self.has_variables, self.gap, self.has_processes)

    async def repeat(self, snapshot: Snapshot, sandbox: Sandbox) -> str | None:
        """Have a sandbox, whose journal this is, run what it has not run yet; return why that can't be done, if so."""
        if snapshot.has_processes:
            return "a process was started there, which is not started again"
        if not snapshot.has_variables:
            return "the interpreter of this sandbox has run other code" if self.has_variables else None
        if snapshot.gap is not None:
            return snapshot.gap
        if self.gap is not None or self.calls != snapshot.calls[: len(self.calls)]:
            return "this sandbox has run something else before"
        last = max(i for i, call in enumerate(snapshot.calls) if call.method == "run_python")
        for number, call in enumerate(snapshot.calls[len(self.calls) : last + 1], len(self.calls) + 1):
            result = await getattr(sandbox, call.method)(**call.arguments)
            if isinstance(result, PythonResult) and outcome_of(result) != call.outcome:
                return f"call {number} of {last + 1} gave another result when it was repeated"
        return None

    def continue_from(self, snapshot: Snapshot, missing: str | None) -> None:
        """Go on from a snapshot that was restored, but for what is missing."""
        self.gap = snapshot.gap or missing
        self.calls = () if self.gap else snapshot.calls
        self.has_variables = snapshot.has_variables and missing is None


def outcome_of(result: PythonResult) -> str:
    """Return what two runs of the same code have in common: not addresses, nor how calls were counted."""
    error = (result.error or "").strip().rpartition("\n")[2]
    said = (result.stdout, result.stderr, str(result.value), error, str(result.state_lost))
    return hashlib.sha256(_ADDRESS.sub("0x", "\0".join(said)).encode(errors="surrogatepass")).hexdigest()


async def fork(
    sandboxes: Sandboxes, sandbox: Sandbox, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0
) -> tuple[Sandbox, str | None]:
    """Open a sandbox that has what another one has; return it, and what `Sandbox.restore` says is missing.

    Args:
        sandboxes: where it is opened.
        sandbox: the other one, which goes on as it was.
        owner: as in `Sandboxes.open`, like what follows.
        limits: what it may use.
        lifetime: seconds.

    Raises:
        SandboxError: if none can be had.
        FileAccessError: if the files can't be read, or do not fit.
    """
    snapshot = await sandbox.snapshot()
    other = await sandboxes.open(owner=owner, limits=limits, lifetime=lifetime)
    try:
        return other, await other.restore(snapshot)
    except BaseException:
        await other.close()
        raise
