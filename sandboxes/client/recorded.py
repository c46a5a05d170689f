"""An agent's sandbox that can be snapshot and restored, as it keeps a journal of its calls."""

from __future__ import annotations

import functools

from agent_rl.sandboxes.agent.worker import UNCOUNTED
from agent_rl.sandboxes.calls import DEFAULT_TIMEOUT, MAX_OUTPUT, Command, ExecResult, PythonResult
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.journal import Journal, outcome_of
from agent_rl.sandboxes.process import Launch, Process
from agent_rl.sandboxes.snapshot import MAX_FILES, Call, Snapshot

_KILL, _AT_ONCE = "import time\ntime.sleep(60)", 0.001
"""Code that ends its interpreter by being late, and after how many seconds."""
_FOLDER = "import os; print(os.getcwd(), end='')"
"""Code that says where the interpreter works; nothing where that is gone."""
_GO_BACK = """
import os, stat
os.chdir(folder)  # of this name there is another one now
for fd in range(3, os.sysconf('SC_OPEN_MAX')):
    try:
        found = os.fstat(fd)
    except OSError:
        continue
    if stat.S_ISREG(found.st_mode) and not found.st_nlink:
        print(fd)
"""
"""Code that goes back there, and says which open files are no longer those of any name."""


class RecordedSandbox(AgentSandbox):
    """A sandbox that is reached over a socket, with `snapshot` and `restore`."""

    @functools.cached_property
    def journal(self) -> Journal:
        """What it was asked for."""
        return Journal()

    async def run_command(self, command: Command) -> ExecResult:
        """Run a command to its end; whatever it leaves running in the background is ended, too."""
        with self.journal.unless_cancelled():
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
        with self.journal.unless_cancelled():
            result = await super().run_python(code, timeout=timeout, max_output=max_output)
        if result.state_lost:
            self.journal.lose_variables()
        elif code:
            arguments = {"code": code, "timeout": timeout, "max_output": max_output}
            outcome = "" if self.journal.gap else outcome_of(result)
            self.journal.add(Call("run_python", arguments, outcome), len(code), result.seconds)
        return result

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it."""
        with self.journal.unless_cancelled():
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
        if missing is not None:
            await self._end_interpreter()
        where = await self._run_unseen(_FOLDER)
        await self._access_file("unpack", {}, snapshot.files)
        if where is not None and where.error is None:
            back = await self._run_unseen(f"folder = {where.stdout!r}\n{_GO_BACK}")
            if back is None or back.error is not None or back.stdout:
                missing = "its interpreter holds files open, or works in a folder, that have been replaced"
                await self._end_interpreter()
        journal.continue_from(snapshot, missing)
        return missing

    async def _run_unseen(self, code: str) -> PythonResult | None:
        """Run code that sees none of the interpreter's variables, and leaves none; None where it has none."""
        unseen = f"{UNCOUNTED.decode()}exec({code!r}, {{}})"
        return await super().run_python(unseen) if self.journal.has_variables else None

    async def _end_interpreter(self) -> None:
        if self.journal.has_variables:
            await self.run_python(_KILL, timeout=_AT_ONCE)
