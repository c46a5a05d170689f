"""E2B's microVMs as sandboxes, by way of the `e2b` SDK.

The agent that answers inside local jails and containers runs here, too, as the first process of a pid namespace of its
own, so that a call means the same everywhere: outputs, timeouts, what is killed, when variables are lost. Its frames go
through the stdin and stdout of one command. A sandbox belongs to the event loop that it was opened in.

Covers what the service does: a kernel of its own, on a machine that is not yours, without internet unless asked for.
Of `Limits` nothing: size and speed are the template's. Whatever becomes of us, the service ends a sandbox when its
lifetime is over.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import shlex
import socket
import weakref
from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.canaries import Once, verify
from agent_rl.sandboxes.client import AgentSandbox
from agent_rl.sandboxes.inside.wire import CHUNK
from agent_rl.sandboxes.sent import ENTRY, greeting

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

START_TIMEOUT = 60.0
"""Seconds that the service has to start a microVM, and the agent to answer from it."""
MAX_LIFETIME = 24 * 3600
_FILTER = """
import base64, os
while data := os.read(0, 49152):
    os.write(1, base64.b64encode(data) + b"\\n")
"""
"""The SDK hands output over as text, so bytes have to look like some."""
_COMMAND = " ".join(
    (
        "mkdir -p /work && chown user: /work && chmod 1777 /tmp &&",
        "unshare --pid --fork --mount-proc --kill-child",
        f"python3 -I -S -B -c {shlex.quote(ENTRY)}",
        f"| python3 -I -S -B -c {shlex.quote(_FILTER)}",
    )
)
MECHANISMS = dict.fromkeys(Guarantee, "microVM") | {Guarantee.KILL_ALL: "the agent is pid 1 of a namespace"}


class E2BSandboxes:
    """Sandboxes that are microVMs of E2B."""

    def __init__(self, *, template: str = "base", api_key: str | None = None, internet: bool = False) -> None:
        """Take note of what to ask for.

        Args:
            template: the microVM's image; it needs a python3 (3.10 or newer), unshare, and a user called "user".
            api_key: $E2B_API_KEY if None.
            internet: whether the code may reach it.

        Raises:
            ConfigError: if there is no key, or the SDK is not installed.
        """
        try:
            from e2b import AsyncSandbox
        except ImportError:
            raise ConfigError("the e2b sandbox needs the SDK: pip install 'agent-rl[e2b]'") from None
        self._key = api_key or os.environ.get("E2B_API_KEY")
        if not self._key:
            raise ConfigError("the e2b sandbox needs a key: set E2B_API_KEY, or give api_key")
        self._create = AsyncSandbox.create
        self.template, self.internet = template, internet
        self._open: weakref.WeakSet[AgentSandbox] = weakref.WeakSet()
        self._verified = Once(lambda: verify(self._spawn, MECHANISMS))

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> AgentSandbox:
        """As in `Sandboxes`; `limits` are the template's, whatever they are here."""
        return await self._spawn(owner, limits or Limits(), lifetime)

    async def capabilities(self) -> Capabilities:
        """As in `Sandboxes`."""
        return await self._verified.get()

    async def close(self) -> None:
        """As in `Sandboxes`."""
        await asyncio.gather(*(sandbox.close() for sandbox in tuple(self._open)), return_exceptions=True)

    async def _spawn(self, owner: str, limits: Limits, lifetime: float) -> AgentSandbox:
        if not 0 < lifetime <= MAX_LIFETIME:
            raise ConfigError(f"lifetime={lifetime}: E2B keeps a sandbox for at most {MAX_LIFETIME} s")
        try:
            async with asyncio.timeout(START_TIMEOUT):
                machine = await self._create(
                    self.template,
                    timeout=math.ceil(lifetime),
                    metadata={"agent-rl.owner": owner},
                    allow_internet_access=self.internet,
                    api_key=self._key,
                )
        except Exception as error:  # the SDK's have no common root
            raise SandboxError(f"E2B could not open a sandbox of {self.template}: {error!r}") from error
        link = _Link(machine)
        sandbox = AgentSandbox(link.ours, name=owner, kill=link.kill, ended=link.ended)
        self._open.add(sandbox)
        try:
            await link.begin(greeting(lifetime, user="user"))
            await sandbox.ready(START_TIMEOUT)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox


class _Link:
    """A socket whose other end is the agent's stdin and stdout, far away."""

    def __init__(self, machine: AsyncSandbox) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.ours.setblocking(False)
        self._theirs.setblocking(False)
        self._machine = machine
        self._line = ""
        self._pid = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._killing: asyncio.Task[None] | None = None

    async def begin(self, greeting: bytes) -> None:
        """Start the agent.

        Raises:
            SandboxError: if the service does not.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT):
                command = await self._machine.commands.run(
                    _COMMAND,
                    background=True,
                    stdin=True,
                    user="root",
                    timeout=0,  # as long as the sandbox
                    on_stdout=self._receive,
                    retain_output=False,
                )
                self._pid = command.pid
                await self._machine.commands.send_stdin(self._pid, greeting)
        except Exception as error:
            raise SandboxError(f"the agent did not start in an E2B sandbox: {error!r}") from error
        self._tasks += [asyncio.create_task(self._send()), asyncio.create_task(self._watch(command))]

    def kill(self) -> None:
        """End the sandbox; a loop that is closed leaves that to the service."""
        self._theirs.close()
        if self._killing is None:
            with contextlib.suppress(RuntimeError):
                self._killing = asyncio.get_running_loop().create_task(self._end())

    async def ended(self) -> None:
        """Wait until the service has ended it."""
        if self._killing is not None:
            await asyncio.shield(self._killing)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):  # it ends with its lifetime at the latest
            async with asyncio.timeout(START_TIMEOUT):
                await self._machine.kill()

    async def _receive(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        data = b"".join(map(base64.b64decode, lines))
        with contextlib.suppress(OSError):  # nobody waits any more
            await asyncio.get_running_loop().sock_sendall(self._theirs, data)

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._theirs, CHUNK):
                async with asyncio.timeout(START_TIMEOUT):
                    await self._machine.commands.send_stdin(self._pid, data)
        except Exception:  # of the network or the service: whoever waits for an answer learns that there is none
            self._theirs.close()

    async def _watch(self, command: AsyncCommandHandle[None]) -> None:
        """Wait until the agent has ended, or its stream has."""
        with contextlib.suppress(Exception):  # why makes no difference
            await command.wait()
        self._theirs.close()
