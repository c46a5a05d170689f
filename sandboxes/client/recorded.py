"""An agent's sandbox that can be snapshot and restored, as it keeps a journal of its calls."""

from __future__ import annotations

import asyncio
import functools

from agent_rl.sandboxes.calls import DEFAULT_TIMEOUT, MAX_OUTPUT, Command, ExecResult, PythonResult
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.journal import Journal, outcome_of
from agent_rl.sandboxes.process import Launch, Process
from agent_rl.sandboxes.snapshot import MAX_FILES, Call, Snapshot

_KILL, _AT_ONCE = "import time\ntime.sleep(60)", 0.001
"""Code that ends its interpreter by being late, and after how many seconds."""


class RecordedSandbox(AgentSandbox):
    """A sandbox that is reached over a socket, with `snapshot` and `restore`."""

    @functools.cached_property
    def journal(self) -> Journal:
        """What it was asked for."""
        return Journal()

    async def run_command(self, command: Command) -> ExecResult:
        """Run a command to its end; whatever it leaves running in the background is ended, too."""
        result = await super().run_command(command)
        self.note(command, result)
        return result

    def note(self, command: Command, result: ExecResult) -> None:
        """Record a command that was run."""
        size = len(command.input) + sum(map(len, command.argv))
        self.journal.add(Call("run_command", {"command": command}, ""), size, result.seconds)

    async def start_process(self, launch: Launch) -> Process:
        """Start a process that goes on when this returns."""
        self.journal.has_processes = True
        return await super().start_process(launch)

    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        """Run code in the sandbox's interpreter, which keeps its variables from call to call."""
        try:
            result = await super().run_python(code, timeout=timeout, max_output=max_output)
        except asyncio.CancelledError:
            self.journal.break_off("a call was cancelled")
            raise
        if result.state_lost:
            self.journal.lose_variables()
        elif code:
            arguments = {"code": code, "timeout": timeout, "max_output": max_output}
            outcome = "" if self.journal.gap else outcome_of(result)
            self.journal.add(Call("run_python", arguments, outcome), len(code), result.seconds)
        return result

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it."""
        await super().write_file(path, data)
        self.journal.add(Call("write_file", {"path": path, "data": data}, ""), len(path) + len(data), 0.0)

    async def close(self) -> None:
        """End everything in it, and give back what it held; its calls, too, or they wait for the garbage collector."""
        self.__dict__.pop("journal", None)
        await super().close()

    async def snapshot(self) -> Snapshot:
        """Return its files, and what brings its interpreter back."""
        files = (await self._access_file("pack", {"keep": MAX_FILES}, b""))[1]
        return self.journal.taken(files)

    async def restore(self, snapshot: Snapshot) -> str | None:
        """Bring another sandbox's files and variables into this one, which has run nothing but what that had, too."""
        journal = self.journal
        missing = await journal.repeat(snapshot, self)
        if missing is not None and journal.has_variables:
            await self.run_python(_KILL, timeout=_AT_ONCE)
        await self._access_file("unpack", {}, snapshot.files)
        journal.continue_from(snapshot, missing)
        return missing
