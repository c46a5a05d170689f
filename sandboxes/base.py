"""Sandboxes: the interface of every backend, and what it guarantees.

What the model's code did wrong is a result; only a failure of the place itself raises (`SandboxError`), so that the
episode is a failed one and is not scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.errors import ConfigError
from agent_rl.sandboxes.calls import (
    DEFAULT_TIMEOUT,
    MAX_FILE,
    MAX_OUTPUT,
    NO_LIMITS,
    WORK,
    Command,
    ExecResult,
    PythonResult,
    check_argv,
    check_call,
    check_user,
)
from agent_rl.sandboxes.process import CONNECT_TIMEOUT, CallLimits, Launch, Process, Stream, check_pty
from agent_rl.sandboxes.snapshot import Snapshot


class Guarantee(StrEnum):
    """A promise of a sandbox about the code in it."""

    FILES = "files"
    """It can't read or write the host's files, other sandboxes' files, or the parent's memory and environment."""
    NETWORK = "network"
    """It can't reach any network, nor a service on the host by any kind of socket."""
    SIGNALS = "signals"
    """It can't signal, trace or list processes outside."""
    KERNEL = "kernel"
    """It can't mount, make namespaces, load code into the kernel, change the clock, or gain rights."""
    MEMORY = "memory"
    """All its processes together have a memory limit."""
    PROCESSES = "processes"
    """The number of its processes and threads has a limit."""
    CPU = "cpu"
    """All its processes together have a limit of processor time per second."""
    DISK = "disk"
    """What it writes has a limit, in bytes and in files."""
    KILL_ALL = "kill_all"
    """A timeout and `close` end every process that it started, whatever that did to get away."""


Capabilities = Mapping[Guarantee, str | None]
"""By what mechanism each guarantee is kept, found by trying to break it when the backend starts; None: it is not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use."""

    memory: int = 512 * 1024 * 1024
    """Bytes, of all its processes together."""
    processes: int = 64
    """Processes and threads at a time."""
    cpus: float = 1.0
    disk: int = 64 * 1024 * 1024
    """Bytes, in `WORK` and /tmp each."""
    files: int = 8192
    """Files and folders, in each of the two."""


class Sandbox(ABC):
    """A place where a model's code runs, from `Sandboxes.open`. Calls on one sandbox run one after another.

    Between calls a sandbox belongs to no event loop, except e2b's, which belong to the one that they were opened in.

    A call that is cancelled ends what it started, like one that times out.

    A sandbox that ends after code ran in it was ended by that code: this is a result too (`sandbox_lost`, for files a
    `FileAccessError`), so that code can't have its episode left unscored. Every method raises `SandboxError` if the
    loss is the infrastructure's: `agent_rl.core.sandbox_loss` has the rule.
    """

    @property
    def loss(self) -> SandboxLoss | None:
        """How the sandbox was lost, once a call has found out; None from a backend that doesn't say."""
        return None

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_output: int = MAX_OUTPUT,
        limits: CallLimits = NO_LIMITS,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command to its end; whatever it leaves running in the background is ended, too.

        Args:
            argv: the program and its arguments; no shell is involved.
            input: what it reads on stdin.
            cwd: where it starts.
            env: variables in addition to PATH, HOME and LANG; nothing of the host's environment is there.
            timeout: seconds until the whole tree of processes is killed.
            max_output: bytes kept of each of stdout and stderr, half from the head, half from the tail.
            limits: what each of its processes may use, where that is less than the sandbox's.
            user: who runs it: by any name, another user of the sandbox's own; its first user if None.

        Raises:
            ConfigError: if `argv` is no command, a limit is out of range, or the sandbox has no other users.
        """
        check_argv(argv)
        check_call(timeout, max_output)
        kept = Command(
            tuple(argv), input, cwd, dict(env or {}), timeout, max_output, limits, check_user(user, self.refuse_users())
        )
        return await self.run_command(kept)

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        limits: CallLimits = NO_LIMITS,
        pty: tuple[int, int] | None = None,
        user: str | None = None,
    ) -> Process:
        """Start a process that goes on when this returns, through other calls, until it or the sandbox ends.

        Args:
            argv: the program and its arguments; no shell is involved.
            cwd: where it starts.
            env: variables in addition to PATH, HOME and LANG.
            limits: what each of its processes may use, where that is less than the sandbox's.
            pty: rows and columns of a terminal that is its stdin, stdout and stderr; pipes if None.
            user: who runs it, as in `exec`.

        Raises:
            ConfigError: if `argv` is no command, or the backend lacks processes that outlive a call, or other users.
            ProcessError: if the sandbox can't have another one; a program that is missing is one that ends with 127.
        """
        check_argv(argv)
        size = pty and check_pty(pty)
        who = check_user(user, self.refuse_users())
        return await self.start_process(Launch(tuple(argv), cwd, dict(env or {}), limits, size, who))

    async def stream(self, address: int | str, *, timeout: float = CONNECT_TIMEOUT) -> Stream:
        """Connect to a server in the sandbox, which has no other network.

        Args:
            address: a TCP port of its 127.0.0.1, or the path of a Unix socket.
            timeout: seconds to wait until a server listens there.

        Raises:
            ConfigError: if `address` is none, or the backend has no streams.
            ProcessError: if nothing listens there, or sockets are refused (Landlock: its ports would be the host's).
        """
        is_port = isinstance(address, int) and 0 < address < 65536
        if isinstance(address, bool) or not (is_port or (isinstance(address, str) and address)):
            raise ConfigError(f"address={address!r}; give a port, 1 to 65535, or the path of a Unix socket")
        check_call(timeout, 0)
        return await self.open_stream(address, timeout)

    def refuse_users(self) -> str | None:
        """Return why no call can have another user here; None if it can."""
        return "a sandbox of this kind has one user, and what runs its code may become no other; docker's have others"

    async def start_process(self, launch: Launch) -> Process:
        """Start a process: `start` for a backend to implement, if it can."""
        raise ConfigError(f"start: {type(self).__name__} has no processes that outlive a call; take another backend")

    async def open_stream(self, address: int | str, timeout: float) -> Stream:
        """Connect to a server: `stream` for a backend to implement, if it can."""
        raise ConfigError(f"stream: {type(self).__name__} has no streams; take another backend")

    @abstractmethod
    async def run_command(self, command: Command) -> ExecResult:
        """Run a command: `exec` for a backend to implement."""

    @abstractmethod
    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        """Run code in the sandbox's interpreter, which keeps its variables from call to call."""

    @abstractmethod
    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a regular file's bytes.

        Raises:
            FileAccessError: if there is none, it is larger than `max_bytes`, or the path leads to something else.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it.

        Raises:
            FileAccessError: if it can't be written there.
        """

    async def snapshot(self) -> Snapshot:
        """Return its files, and what brings its interpreter back; processes that run are not in it.

        Raises:
            NotImplementedError: if the backend has no snapshots.
            FileAccessError: if the files can't be read, or are too many or too large.
        """
        raise self._without_snapshots()

    async def restore(self, snapshot: Snapshot) -> str | None:
        """Bring another sandbox's files and variables into this one, which has run nothing but what that had, too.

        Returns:
            None if everything is as it was; else why there are only the files, beside a new interpreter.

        Raises:
            NotImplementedError: if the backend has no snapshots.
            FileAccessError: if the files do not fit, or are no snapshot's; then some may be there.
        """
        raise self._without_snapshots()

    def _without_snapshots(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no snapshots; local and docker sandboxes have")

    async def fork(
        self, sandboxes: Sandboxes, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0
    ) -> tuple[Sandbox, str | None]:
        """Open a sandbox that has what this one has; return it, and what `restore` says is missing.

        Args:
            sandboxes: where it is opened, as `Sandboxes.open` does, which describes the rest.
            owner: who holds it.
            limits: what it may use.
            lifetime: seconds.

        Raises:
            SandboxError: if none can be had.
            NotImplementedError: if the backend has no snapshots.
            FileAccessError: if the files can't be read, or do not fit.
        """
        snapshot = await self.snapshot()
        other = await sandboxes.open(owner=owner, limits=limits, lifetime=lifetime)
        try:
            return other, await other.restore(snapshot)
        except BaseException:
            await other.close()
            raise

    @abstractmethod
    async def close(self) -> None:
        """End everything in it and give back what it held. A second call does nothing."""


@runtime_checkable
class Sandboxes(Protocol):
    """A backend: it opens sandboxes, each new, and counts them so that none outlives its owner."""

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> Sandbox:
        """Open a sandbox.

        Args:
            owner: who holds it, such as an episode's id; shown where it is listed.
            limits: what it may use; the backend's own if None.
            lifetime: seconds until it is closed, whatever its owner does.

        Raises:
            SandboxError: if none can be had.
        """
        ...

    async def capabilities(self) -> Capabilities:
        """Return what is guaranteed here and now, found by trying."""
        ...

    async def close(self) -> None:
        """Close every open sandbox, and the backend itself."""
        ...
