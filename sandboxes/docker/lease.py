"""The lease of a docker sandbox: its running container, as the engine ends it, knows it and starts agents in it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from agent_rl.core.messages import JSON
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.client.remote import greeting
from agent_rl.sandboxes.docker.container import ARGV, uid_of
from agent_rl.sandboxes.docker.engine import Engine


@dataclass
class Lease:
    """A running container, from the host's side."""

    engine: Engine
    threads: ThreadPoolExecutor
    """In which the engine is asked."""
    container: str
    remove: Callable[[], str | None]
    """Removes it, with what is beside it, or says why not."""
    user: int
    """Of its first agent."""
    variables: Mapping[str, str]
    """Of the code in it."""
    expires: float
    """By `time.monotonic`."""
    _removed: Future[str | None] | None = field(default=None, init=False)

    def give_up(self) -> None:
        """Have the container removed."""
        self._removed = self._removed or self.threads.submit(self.remove)

    async def ended(self) -> str | None:
        """Wait until a container that was given up is removed; return why it is not."""
        return None if self._removed is None else await asyncio.wrap_future(self._removed)

    async def evidence(self, has_ended: bool) -> Mapping[str, JSON]:
        """Return how the container ended, if it has, as far as the engine says it."""
        if has_ended:
            with contextlib.suppress(SandboxError):
                return dict(await asyncio.wrap_future(self.threads.submit(self.engine.ending, self.container)))
        return {}

    async def join(self, number: int, variables: Mapping[str, str]) -> socket.socket:
        """Start an agent of another user; see `users.Join`."""
        left = max(0.001, self.expires - time.monotonic())
        first, uid = greeting(left, variables={**self.variables, **variables}), uid_of(self.user, number)
        joining = self.threads.submit(self.engine.join, self.container, ARGV, f"{uid}:{uid}", first)
        try:
            return await asyncio.wrap_future(joining)
        except asyncio.CancelledError:
            joining.add_done_callback(_close)  # a thread can't be stopped
            raise


def _close(joined: Future[socket.socket]) -> None:
    """End a program whose start was cancelled."""
    if not joined.cancelled() and joined.exception() is None:
        joined.result().close()
