r"""Processes that outlive a call, and streams of bytes to the servers in a sandbox: the interface of every backend.

    server = await sandbox.start(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"])
    async with await sandbox.stream(8000) as stream:
        await stream.write(b"GET / HTTP/1.0\r\n\r\n")
        print((await stream.read()).data)
    print((await server.logs()).stderr)
    await server.kill()

They end with their sandbox at the latest. What their code did wrong is a result, or a `ProcessError` where there can be
none; `SandboxError` says that the place itself has failed, as everywhere.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.agent.job import MOST, PIECE, TAIL

READ_TIMEOUT = 30.0
"""Seconds that a read, a write or a wait takes at most, by default."""
CONNECT_TIMEOUT = 10.0
MAX_LOG = TAIL
"""Bytes kept of each of a process's stdout and stderr: the last ones."""
MAX_PROCESSES = MOST
"""Processes and streams that a sandbox can have open at a time."""
MAX_READ = PIECE
"""Bytes that one read returns, at most."""


class ProcessError(OSError):
    """A process or a stream that can't be started, reached or written to, or whose sandbox its code has ended."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What each process of one call may use. They only lower the sandbox's: a larger one changes nothing."""

    memory: int | None = None
    """Bytes of address space."""
    cpu_seconds: int | None = None
    """Seconds of processor time, until SIGXCPU ends it (a second later SIGKILL)."""
    file_size: int | None = None
    """Bytes of a file that it writes."""
    open_files: int | None = None
    """Descriptors."""

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 60:
                raise ConfigError(f"CallLimits({name}={value!r}): give a whole number above 0")

    def given(self) -> dict[str, int]:
        """Return those that were given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start; `Sandbox.start` describes the fields."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    limits: CallLimits
    pty: tuple[int, int] | None
    user: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What one read brought."""

    data: bytes
    """Empty if the time was over first, or at the end."""
    dropped: int = 0
    """Bytes before these that nobody read in time: of a process's output the last `MAX_LOG` are kept."""
    ended: bool = False
    """Whether nothing more comes."""


@dataclass(frozen=True, slots=True)
class Logs:
    """The last of what a process printed, read or not."""

    stdout: str
    stderr: str
    """Both decoded as UTF-8; what isn't is escaped as `\\xNN`. With a pty all is in stdout."""
    truncated: bool = False
    """Whether there was more before."""


class Stream(ABC):
    """Bytes in both directions. Reads may wait while others write, and while the sandbox runs other calls.

    As a context manager it is closed at the end.
    """

    @abstractmethod
    async def read(self, max_bytes: int = MAX_READ, *, timeout: float = READ_TIMEOUT) -> Output:
        """Return the next bytes, as soon as there are any; nothing is lost by a cancellation.

        Raises:
            ConfigError: if a number is out of range.
            ProcessError: if the sandbox was ended by its code.
        """

    @abstractmethod
    async def write(self, data: bytes, *, timeout: float = READ_TIMEOUT) -> None:
        """Write all of it; the other side may not have read it yet.

        Raises:
            ProcessError: if the other side is closed, or there was no room within the time: a part may be written.
        """

    @abstractmethod
    async def write_eof(self) -> None:
        """Tell the other side that no more comes; on a pty, type Ctrl-D."""

    @abstractmethod
    async def close(self) -> None:
        """End it, a process with all that descends from it; a second call does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Process(Stream):
    """A process: reads are of its stdout, writes go to its stdin.

    It lives until it ends, is killed, or its sandbox ends; then what it left running is ended too, at the next
    command at the latest. Code that leaves no room for other processes can bring it down.
    """

    @abstractmethod
    async def logs(self, max_bytes: int = MAX_LOG) -> Logs:
        """Return the last bytes of each of stdout and stderr; reads are not affected."""

    @abstractmethod
    async def wait(self, *, timeout: float = READ_TIMEOUT) -> int | None:
        """Return how it ended, as `ExecResult.returncode`; None if it still runs after the time."""

    @abstractmethod
    async def signal(self, number: int) -> None:
        """Send it a signal, such as `signal.SIGINT`; nothing happens if it has ended."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its pty.

        Raises:
            ProcessError: if it has none.
        """

    async def poll(self) -> int | None:
        """Return how it ended; None if it runs."""
        return await self.wait(timeout=0)

    async def kill(self) -> None:
        """End it and all that descends from it; its logs stay until `close`."""
        await self.signal(signal.SIGKILL)


def check_pty(size: tuple[int, int]) -> tuple[int, int]:
    """Return a terminal's rows and columns.

    Raises:
        ConfigError: if they are none.
    """
    if len(size) != 2 or not all(isinstance(number, int) and 0 < number < 10_000 for number in size):
        raise ConfigError(f"pty={size!r}; give rows and columns, such as (24, 80)")
    return size[0], size[1]
