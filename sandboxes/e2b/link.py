"""The way to an agent in a microVM of E2B: its frames go through the stdin and stdout of one command."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import shlex
import socket
from typing import TYPE_CHECKING

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import CHUNK
from agent_rl.sandboxes.base import WORK
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.remote import ENTRY
from agent_rl.sandboxes.e2b import kernel

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

START_TIMEOUT = 60.0
"""Seconds that the service has to start a microVM, and what is in it to answer."""
USER = "user"
"""Whom the model's code runs as; E2B's templates have one of that name."""
_ENCODE = f"{inspect.getsource(kernel.encode_output)}\nencode_output()"
_COMMAND = " ".join(
    (
        f"mkdir -p {WORK} && chown {USER}: {WORK} && chmod 1777 /tmp &&",
        "unshare --pid --fork --mount-proc --kill-child",
        f"python3 -I -S -B -c {shlex.quote(ENTRY)}",
        f"| python3 -I -S -B -c {shlex.quote(_ENCODE)}",
    )
)


class Link:
    """A socket whose other end is the agent's stdin and stdout, far away."""

    def __init__(self, machine: AsyncSandbox) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.ours.setblocking(False)
        self._theirs.setblocking(False)
        self.machine = machine
        self.gone = asyncio.Event()
        """Set when the sandbox ends, or is lost."""
        self._line = ""
        self._pid = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._killing: asyncio.Task[str | None] | None = None
        self._failure: str | None = None

    async def begin(self, greeting: bytes) -> None:
        """Start the agent.

        Raises:
            SandboxError: if the service does not.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT):
                command = await self.machine.commands.run(
                    _COMMAND,
                    background=True,
                    stdin=True,
                    user="root",
                    timeout=0,  # as long as the sandbox
                    on_stdout=self._receive,
                    retain_output=False,
                )
                self._pid = command.pid
                await self.machine.commands.send_stdin(self._pid, greeting)
        except Exception as error:
            raise SandboxError(f"the agent did not start in an E2B sandbox: {error!r}") from error
        self._tasks += [asyncio.create_task(self._send()), asyncio.create_task(self._watch(command))]

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
        """Return what has failed of the service; None if it was the microVM, or what runs in it, that ended."""
        return self._failure or await self.ended()

    async def _end(self) -> str | None:
        for task in self._tasks:
            task.cancel()
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self.machine.kill()
        except Exception as error:  # it ends with its lifetime at the latest
            return f"E2B could not be asked to end it: {error!r}"
        return None

    async def _receive(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        data = b"".join(map(base64.b64decode, lines))
        with contextlib.suppress(OSError):  # the sandbox was closed
            await asyncio.get_running_loop().sock_sendall(self._theirs, data)

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._theirs, CHUNK):
                async with asyncio.timeout(START_TIMEOUT):
                    await self.machine.commands.send_stdin(self._pid, data)
        except Exception as error:  # the waiting call fails
            await self._blame(error)

    async def _watch(self, command: AsyncCommandHandle[None]) -> None:
        """Wait until the agent has ended, or its stream has."""
        try:
            await command.wait()
            self._theirs.close()
        except Exception as error:
            await self._blame(error)

    async def _blame(self, error: Exception) -> None:
        """Break the connection off; note that the service did, unless the agent or its microVM is gone.

        Those may be the act of code: of memory that it used up, for one.
        """
        from e2b import CommandExitException, NotFoundException

        if not (self.gone.is_set() or isinstance(error, CommandExitException | NotFoundException | ValueError)):
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    runs = await self.machine.is_running()
            except Exception:  # nor can it be asked
                runs = True
            self._failure = f"E2B broke the connection off: {error!r}" if runs else None
        self._theirs.close()


class LinkedSandbox(AgentSandbox):
    """A sandbox in a microVM; `await ready()` comes first."""

    def __init__(self, link: Link, *, name: str = "", expires: float) -> None:
        super().__init__(
            link.ours, name=name, expires=expires, kill=link.kill, ended=link.ended, host_failure=link.host_failure
        )
