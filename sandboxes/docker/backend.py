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
import socket
import time
import uuid
import weakref
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from agent_rl.concurrency import AsyncOnce
from agent_rl.errors import ConfigError, SandboxError, did_you_mean
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits, Sandbox
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.remote import greeting
from agent_rl.sandboxes.docker.container import ARGV, Demultiplexer, any_user, collect, confinement, labels
from agent_rl.sandboxes.docker.engine import TIMEOUT, Engine
from agent_rl.sandboxes.docker.image import IMAGE
from agent_rl.sandboxes.registry import register_sandbox
from agent_rl.sandboxes.verification import verify

STARTS = 4
"""How many containers are started or removed at a time: more make an engine slower, not faster."""
MECHANISMS = {
    Guarantee.FILES: "mount namespace, read-only root",
    Guarantee.NETWORK: "network namespace without a network, seccomp",
    Guarantee.SIGNALS: "pid namespace",
    Guarantee.KERNEL: "no capabilities, no_new_privs, seccomp",
    Guarantee.MEMORY: "cgroup",
    Guarantee.PROCESSES: "cgroup",
    Guarantee.CPU: "cgroup",
    Guarantee.DISK: "sized tmpfs",
    Guarantee.KILL_ALL: "the agent is pid 1 of the namespace",
}


@register_sandbox("docker")
class DockerSandboxes:
    """Sandboxes that are containers of a Docker engine."""

    def __init__(
        self,
        *,
        image: str = IMAGE,
        host: str | None = None,
        runtime: str | None = None,
        limits: Limits | None = None,
        require: Collection[str] = (),
        starts: int = STARTS,
    ) -> None:
        """Store the settings; the engine is reached when the first sandbox is opened.

        Args:
            image: needs a python3 (3.10 or newer); `agent-rl sandbox build-image` makes the default.
            host: the engine's address; $DOCKER_HOST, or Docker's own default, if None.
            runtime: the engine's own if None; "runsc" is gVisor.
            limits: of a sandbox that is opened without any.
            require: the guarantees that are tried before the first sandbox is opened; without them there is none.
            starts: how many containers may be started or removed at a time.

        Raises:
            ConfigError: if streams can't be attached to at that address, or there is no such guarantee.
        """
        self.engine = Engine(host)
        self.image, self.runtime, self.limits = image, runtime, limits or Limits()
        self._require = frozenset(map(_guarantee, require))
        self._threads = ThreadPoolExecutor(starts, thread_name_prefix="docker")
        self._open: weakref.WeakSet[AgentSandbox] = (
            weakref.WeakSet()
        )  # dropped references are collected and their containers stop
        self._verified = AsyncOnce(lambda: verify(self._spawn, MECHANISMS))
        self._closed = False
        self._tidy = False
        """Whether orphans were collected since the engine was last seen to fail."""

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> Sandbox:
        """As in `Sandboxes`."""
        if self._require:
            found = await self.capabilities()
            if missing := sorted(guarantee for guarantee in self._require if found[guarantee] is None):
                raise SandboxError(
                    f"containers at {self.engine.host} don't guarantee {', '.join(missing)}; don't require "
                    "it, or give the engine what it lacks, such as cgroups"
                )
        return await self._spawn(owner, limits or self.limits, lifetime)

    async def capabilities(self) -> Capabilities:
        """As in `Sandboxes`."""
        return await self._verified.get()

    async def close(self) -> None:
        """As in `Sandboxes`."""
        self._closed = True
        await asyncio.gather(*(sandbox.close() for sandbox in tuple(self._open)), return_exceptions=True)
        self.engine.close()

    async def _spawn(self, owner: str, limits: Limits, lifetime: float) -> AgentSandbox:
        if self._closed:
            raise SandboxError("this docker backend was closed")
        if not self._tidy:
            await asyncio.wrap_future(self._threads.submit(collect, self.engine))
            self._tidy = True
        starting = self._threads.submit(self._start, limits, owner, lifetime)
        try:
            container, stream = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._drop)  # a thread can't be stopped
            raise
        removed: Future[str | None] | None = None

        def kill() -> None:
            nonlocal removed
            removed = removed or self._threads.submit(self._remove, container)

        async def ended() -> None:
            if removed is not None:
                await asyncio.wrap_future(removed)

        async def failure() -> str | None:
            return None if removed is None else await asyncio.wrap_future(removed)

        demultiplexer = Demultiplexer()
        sandbox = AgentSandbox(
            stream,
            name=owner or container[:12],
            expires=time.monotonic() + lifetime,
            kill=kill,
            ended=ended,
            host_failure=failure,
            decode=demultiplexer.feed,
        )
        self._open.add(sandbox)
        try:
            async with asyncio.timeout(TIMEOUT):
                await asyncio.get_running_loop().sock_sendall(stream, greeting(lifetime))
            await sandbox.ready(TIMEOUT)
        except (OSError, SandboxError) as error:  # a TimeoutError is one
            await sandbox.close()
            raise SandboxError(f"a container's agent did not start: {error} {demultiplexer.complaint}") from error
        except asyncio.CancelledError:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    def _start(self, limits: Limits, owner: str, lifetime: float) -> tuple[str, socket.socket]:
        """Start a container; return its id, and the stream to its agent."""
        user = any_user()
        container = self.engine.create(
            self.image,
            ARGV,
            {**confinement(limits, user), **({"Runtime": self.runtime} if self.runtime else {})},
            name=f"agent-rl-{uuid.uuid4().hex[:12]}",
            user=f"{user}:{user}",
            labels=labels(owner, lifetime),
            working_dir="/",
            hostname="sandbox",
        )
        try:
            return container, self.engine.start(container)
        except BaseException:
            self._remove(container)
            raise

    def _drop(self, started: Future[tuple[str, socket.socket]]) -> None:
        """Remove a container whose `open` was cancelled."""
        if not started.cancelled() and started.exception() is None:
            container, stream = started.result()
            stream.close()
            self._remove(container)

    def _remove(self, container: str) -> str | None:
        """Remove a container, or say why not; its agent ends by itself where the engine can't be reached."""
        try:
            self.engine.remove(container)
        except SandboxError as error:
            self._tidy = False
            return str(error)
        return None


def _guarantee(name: str) -> Guarantee:
    if name not in list(Guarantee):
        raise ConfigError(f"require: there is no guarantee '{name}'.{did_you_mean(name, Guarantee)}")
    return Guarantee(name)
