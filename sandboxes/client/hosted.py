"""Sandboxes that a service rents out: an agent far away, reached through the stdin and stdout of one command."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import shlex
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.agent.frames import CHUNK
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.calls import WORK
from agent_rl.sandboxes.client.backend import AgentSandboxes
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.remote import ENTRY, greeting

START_TIMEOUT = 60.0
"""Seconds that a service has to start a sandbox, and what is in it to answer."""
MAX_LIFETIME = 24 * 3600
"""Seconds that a service keeps a sandbox, at most."""
LINE = 1 << 20
"""Characters of a line of base64, at most: `encode_output` writes 65,537."""
NAMESPACE = "unshare --pid --fork --mount-proc --kill-child"
"""Makes the agent the first process of a pid namespace of its own."""


def agent_command(user: str, namespace: str = NAMESPACE) -> str:
    """Return the shell's words that start an agent as root, whose code runs as `user`."""
    prepare = f"mkdir -p {WORK} && chown {user}: {WORK} && chmod 1777 /tmp &&"
    return f"{prepare} {namespace} python3 -I -S -B -c {shlex.quote(ENTRY)}"


def kept_by(mechanism: str, *, internet: bool, lacking: frozenset[Guarantee]) -> Capabilities:
    """Return what should keep each guarantee where a service's own mechanism keeps all but those that are lacking."""
    return {
        **dict.fromkeys(Guarantee, mechanism),
        **dict.fromkeys(lacking),
        Guarantee.NETWORK: None if internet else "the service's firewall",
        Guarantee.KILL_ALL: "the agent is pid 1 of a namespace",
    }


def source_command(function: Callable[[], None]) -> str:
    """Return the shell's words that run a function there, which imports what it uses."""
    return f"python3 -I -S -B -c {shlex.quote(f'{inspect.getsource(function)}{chr(10)}{function.__name__}()')}"


def encode_output() -> None:
    """Copy stdin to stdout as lines of base64: for a service that hands output over as text."""
    import base64
    import os

    while data := os.read(0, 49152):
        os.write(1, base64.b64encode(data) + b"\n")


def decode_input() -> None:
    """Copy lines of base64 from stdin to stdout: for a service that takes input as text."""
    import base64
    import sys

    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(base64.b64decode(line))
        sys.stdout.buffer.flush()


class Link(ABC):
    """A socket whose other end is the agent's stdin and stdout, far away.

    Args:
        service: whose it is, for messages.
    """

    def __init__(self, service: str) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.ours.setblocking(False)
        self._theirs.setblocking(False)
        self.gone = asyncio.Event()
        """Set when the sandbox ends, or is lost."""
        self._service = service
        self._line = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._killing: asyncio.Task[str | None] | None = None
        self._failure: str | None = None

    @abstractmethod
    async def _start(self) -> None:
        """Start the agent's command."""

    @abstractmethod
    async def _write(self, data: bytes) -> None:
        """Write to its stdin."""

    @abstractmethod
    async def _wait(self) -> None:
        """Wait until it, or its stdout, has ended; what it prints goes to `_receive` at the latest from here on."""

    @abstractmethod
    async def _terminate(self) -> None:
        """Have the service end the sandbox."""

    @abstractmethod
    async def _runs(self) -> bool:
        """Return whether the sandbox still runs, for all that the service knows."""

    @abstractmethod
    def _tells_of_the_end(self, error: Exception) -> bool:
        """Return whether an error says that the agent or its sandbox is gone."""

    async def begin(self, greeting: bytes) -> None:
        """Start the agent.

        Raises:
            SandboxError: if the service does not.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._start()
                await self._write(greeting)
        except Exception as error:  # the SDKs' have no common root
            raise SandboxError(f"the agent did not start in a sandbox of {self._service}: {error!r}") from error
        self._tasks += [asyncio.create_task(self._send()), asyncio.create_task(self._watch())]

    def kill(self) -> None:
        """End the sandbox; with a closed loop, the service does it."""
        self._theirs.close()
        self.gone.set()
        if self._killing is None:
            with contextlib.suppress(RuntimeError):
                self._killing = asyncio.get_running_loop().create_task(self._end())

    async def ended(self) -> str | None:
        """Wait until the service has ended it; return why it could not."""
        return None if self._killing is None else await asyncio.shield(self._killing)

    async def host_failure(self) -> str | None:
        """Return what has failed of the service; None if it was the sandbox, or what runs in it, that ended."""
        return self._failure or await self.ended()

    async def _end(self) -> str | None:
        for task in self._tasks:
            task.cancel()
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._terminate()
        except Exception as error:  # it ends with its lifetime at the latest
            return f"{self._service} could not be asked to end it: {error!r}"
        return None

    async def _receive(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the sandbox was closed
            await asyncio.get_running_loop().sock_sendall(self._theirs, data)

    async def _receive_text(self, text: str) -> None:
        """Receive lines of base64, cut anywhere.

        Raises:
            ValueError: if one is longer than an agent's.
        """
        *lines, self._line = (self._line + text).split("\n")
        if len(self._line) > LINE:
            raise ValueError(f"a line of more than {LINE} characters, which no agent writes")
        await self._receive(b"".join(map(base64.b64decode, lines)))

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._theirs, CHUNK):
                async with asyncio.timeout(START_TIMEOUT):
                    await self._write(data)
        except Exception as error:  # the waiting call fails
            await self._blame(error)

    async def _watch(self) -> None:
        """Wait until the agent has ended, or its stream has."""
        try:
            await self._wait()
            self._theirs.close()
        except Exception as error:
            await self._blame(error)

    async def _blame(self, error: Exception) -> None:
        """Break the connection off; note that the service did, unless the agent or its sandbox is gone.

        Those may be the act of code: of memory that it used up, for one.
        """
        if not (self.gone.is_set() or isinstance(error, ValueError) or self._tells_of_the_end(error)):
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    runs = await self._runs()
            except Exception:  # nor can it be asked
                runs = True
            self._failure = f"{self._service} broke the connection off: {error!r}" if runs else None
        self._theirs.close()


class LinkedSandbox(AgentSandbox):
    """A sandbox at the other end of a link; `await ready()` comes first."""

    def __init__(self, link: Link, *, name: str = "", expires: float) -> None:
        super().__init__(
            link.ours, name=name, expires=expires, kill=link.kill, ended=link.ended, host_failure=link.host_failure
        )


class HostedSandboxes(AgentSandboxes):
    """Sandboxes of a service."""

    service: str
    """Its name, for messages."""
    user: str
    """Whom the model's code runs as."""

    @abstractmethod
    async def rent(self, owner: str, limits: Limits, lifetime: float) -> Link:
        """Have the service start a sandbox; any error says that it did not."""

    def connect(self, link: Link, owner: str, expires: float) -> AgentSandbox:
        """Return the sandbox behind a link."""
        return LinkedSandbox(link, name=owner, expires=expires)

    async def spawn(self, owner: str, limits: Limits, lifetime: float) -> AgentSandbox:
        """Have the service start a sandbox, and an agent in it."""
        if not 0 < lifetime <= MAX_LIFETIME:
            raise ConfigError(f"lifetime={lifetime}: {self.service} keeps a sandbox for at most {MAX_LIFETIME} s")
        expires = time.monotonic() + lifetime
        try:
            async with asyncio.timeout(START_TIMEOUT):
                link = await self.rent(owner, limits, lifetime)
        except Exception as error:  # the SDKs' have no common root
            raise SandboxError(f"{self.service} could not open a sandbox: {error!r}") from error
        sandbox = self.connect(link, owner, expires)
        async with self.starting(sandbox):
            await link.begin(greeting(lifetime, user=self.user))
            await sandbox.ready(START_TIMEOUT)
        return sandbox
