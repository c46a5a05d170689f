"""The lease of a local sandbox: it lives as long as the host holds it, and the zygote says over it how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_rl.concurrency import LoopLock
from agent_rl.core.messages import JSON
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.local import cgroups

START_TIMEOUT = 30.0
"""Seconds that the zygote has to start or to end a sandbox."""
REPORT_TIMEOUT = 2.0
"""Seconds until an ended agent counts as one of which nothing is known."""


class Lease:
    """A sandbox's lease, from the host's side.

    Args:
        held: the socket whose other end the zygote holds.
        folders: of the sandbox's cgroup.
    """

    def __init__(self, held: socket.socket, folders: Sequence[Path]) -> None:
        self._held, self._folders = held, folders
        held.setblocking(False)
        self._turn = LoopLock()
        self._said = b""
        self._is_over = False

    def give_up(self) -> None:
        """Have the zygote end the sandbox."""
        with contextlib.suppress(OSError):
            self._held.shutdown(socket.SHUT_WR)

    async def evidence(self, ended: bool) -> Mapping[str, JSON]:
        """Return what the sandbox's cgroup has counted; how its first process ended, too, if it has."""
        if not ended:
            return cgroups.events(self._folders)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(REPORT_TIMEOUT):
                while not self._said.endswith(b"\n") and not self._is_over:
                    await self._hear()
        return dict(json.loads(self._said)) if self._said.endswith(b"\n") else {}

    async def ended(self) -> None:
        """Wait until the zygote has let go of the sandbox.

        Raises:
            SandboxError: if that takes too long, or the zygote is gone.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not self._is_over:
                    await self._hear()
        except (TimeoutError, OSError) as error:
            raise SandboxError(f"a sandbox did not end, or its zygote is gone: {error!r}") from error
        finally:
            self._is_over = True
            self._held.close()

    async def _hear(self) -> None:
        async with self._turn:
            if not self._is_over:
                data = await asyncio.get_running_loop().sock_recv(self._held, 4096)
                self._said += data
                self._is_over = not data
