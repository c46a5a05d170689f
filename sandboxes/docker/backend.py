"""Docker containers as sandboxes: one container each, spoken to through its stdin and stdout.

Covers, with our seccomp profile: the host's files, every network, signals, namespaces and the kernel's less used calls;
memory, processes, processor time, and what is written. Does not cover: a flaw in the kernel that the container shares
with the host, in the engine, or in the processor; for that, give the engine a runtime with a kernel of its own
(`runtime="runsc"`).

A container's first process is our agent, and it ends when its stdin does. So a trainer that dies in whatever way takes
its containers with it; those that it had created but not started are collected when the next one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Capabilities, Limits, Sandbox
from agent_rl.sandboxes.docker.container import ARGV, any_user, confinement, greeting
from agent_rl.sandboxes.docker.engine import TIMEOUT, Engine
from agent_rl.sandboxes.docker.image import IMAGE
from agent_rl.sandboxes.docker.orphans import LABEL, collect, labels
from agent_rl.sandboxes.docker.stream import Demultiplexer
from agent_rl.sandboxes.session import Session

P = ParamSpec("P")
T = TypeVar("T")

STARTS = 4
"""How many containers are started or removed at a time: more make an engine slower, not faster."""


class DockerSandboxes:
    """Sandboxes that are containers of a Docker engine."""

    def __init__(
        self,
        *,
        image: str = IMAGE,
        host: str | None = None,
        runtime: str | None = None,
        limits: Limits | None = None,
        starts: int = STARTS,
    ) -> None:
        """Take note of where and how; the engine is reached when the first sandbox is opened.

        Args:
            image: needs a python3 (3.10 or newer); `agent-rl sandbox build-image` makes the default.
            host: the engine's address; $DOCKER_HOST, or Docker's own default, if None.
            runtime: the engine's own if None; "runsc" is gVisor.
            limits: of a sandbox that is opened without any.
            starts: how many containers may be started at a time.

        Raises:
            ConfigError: if streams can't be attached to at that address.
        """
        self.engine = Engine(host)
        self.image, self.runtime, self.limits = image, runtime, limits or Limits()
        self._slots = threading.Semaphore(starts)
        self._sessions: set[Session] = set()
        self._capabilities: Capabilities | None = None
        self._collected = False
        self._closed = False

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> Sandbox:
        """As in `Sandboxes`."""
        if self._closed:
            raise SandboxError("this backend was closed")
        if not self._collected:
            await self._in_thread(lambda: collect(self.engine))
            self._collected = True
        box = _Starting(self, limits or self.limits, owner, lifetime)
        try:
            container, stream = await self._in_thread(box.start)
        except asyncio.CancelledError:
            box.give_up()
            raise
        demultiplexer = Demultiplexer()
        session = Session(stream, functools.partial(self._end, container), demultiplexer.feed)
        self._sessions.add(session)
        try:
            await session.greet(greeting(lifetime), TIMEOUT)
        except BaseException as error:
            await asyncio.shield(session.close())
            if isinstance(error, SandboxError) and demultiplexer.complaint:
                raise SandboxError(f"{error}: {demultiplexer.complaint}") from error
            raise
        return session
