"""The journal of a sandbox's calls, by which another one's interpreter gets the same variables."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Iterator

from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.calls import Command, PythonResult
from agent_rl.sandboxes.snapshot import Call, Snapshot

MAX_CALLS = 256
MAX_RECORDED = 4 * 1024 * 1024
"""Bytes of code, commands and written files that are kept to be repeated, at most."""
MAX_SECONDS = 60.0
"""Seconds that the recorded calls took together, at most."""
LOOKED_AT = 4096
"""Characters of each text that are compared: a hostile one would keep the event loop busy for milliseconds."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


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

    @contextlib.contextmanager
    def unless_cancelled(self) -> Iterator[None]:
        """Let a call be made; where it is cancelled, nobody knows what it has done."""
        try:
            yield
        except asyncio.CancelledError:
            self.break_off("a call was cancelled")
            raise

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
            command = call.arguments.get("command")
            if isinstance(command, Command) and command.user and (refused := sandbox.refuse_users()):
                return f"call {number} of {last + 1} was one of user {command.user}, and {refused}"
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
    looked_at = "\0".join(f"{len(text) if len(text) > LOOKED_AT else ''} {text[:LOOKED_AT]}" for text in said)
    return hashlib.sha256(_ADDRESS.sub("0x", looked_at).encode(errors="surrogatepass")).hexdigest()
