"""A sandbox for tests: it runs nothing, answers by a function and keeps files in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits, Sandbox
from agent_rl.sandboxes.calls import (
    DEFAULT_TIMEOUT,
    MAX_FILE,
    MAX_OUTPUT,
    WORK,
    Command,
    ExecResult,
    FileAccessError,
    PythonResult,
)


def _silent_command(argv: Sequence[str]) -> ExecResult:
    return ExecResult(0, "", "")


def _silent_code(code: str) -> PythonResult:
    return PythonResult("", "")


@dataclass
class FakeSandbox(Sandbox):
    """A sandbox with given answers; `calls` lists the requests."""

    on_exec: Callable[[Sequence[str]], ExecResult] = _silent_command
    on_python: Callable[[str], PythonResult] = _silent_code
    owner: str = ""
    calls: list[str] = field(default_factory=list)
    """Commands, joined by spaces, and code, in the order in which they came."""
    files: dict[str, bytes] = field(default_factory=dict)
    """By absolute path."""
    closed: bool = False

    async def run_command(self, command: Command) -> ExecResult:
        """Return what `on_exec` says."""
        self._check_open()
        self.calls.append(" ".join(command.argv))
        return self.on_exec(command.argv)

    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        """Return what `on_python` says."""
        self._check_open()
        self.calls.append(code)
        return self.on_python(code)

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return what was written."""
        self._check_open()
        data = self.files.get(_absolute(path))
        if data is None:
            raise FileAccessError(f"{path}: no such file")
        if len(data) > max_bytes:
            raise FileAccessError(f"{path} has {len(data)} bytes; at most {max_bytes} are read")
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        """Keep a file."""
        self._check_open()
        self.files[_absolute(path)] = data

    async def close(self) -> None:
        """Answer no more."""
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxError(f"the sandbox of '{self.owner}' was lost: it was closed")


@dataclass
class FakeSandboxes:
    """Opens fakes, all with the same answers; those that it opened are in `opened`."""

    on_exec: Callable[[Sequence[str]], ExecResult] = _silent_command
    on_python: Callable[[str], PythonResult] = _silent_code
    opened: list[FakeSandbox] = field(default_factory=list)

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> FakeSandbox:
        """Open a fake."""
        self.opened.append(FakeSandbox(self.on_exec, self.on_python, owner))
        return self.opened[-1]

    async def capabilities(self) -> Capabilities:
        """Return that nothing is guaranteed, as nothing runs."""
        return dict.fromkeys(Guarantee)

    async def close(self) -> None:
        """Close every fake."""
        for sandbox in self.opened:
            await sandbox.close()


def _absolute(path: str) -> str:
    return str(PurePosixPath(WORK, path))
