"""Docker containers as sandboxes: one container each, spoken to through its stdin and stdout.

A container's first process is our agent, and it ends when its stdin does. So a trainer that dies in whatever way takes
its containers with it; those that it had created but not started are collected when the next one starts.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.client.backend import AgentSandboxes
from agent_rl.sandboxes.client.remote import greeting
from agent_rl.sandboxes.docker.compose import read_compose
from agent_rl.sandboxes.docker.container import ARGV, Demultiplexer, any_user, collect, confinement, labels
from agent_rl.sandboxes.docker.engine import TIMEOUT, Engine
from agent_rl.sandboxes.docker.etc import Etc, collect_files
from agent_rl.sandboxes.docker.image import IMAGE
from agent_rl.sandboxes.docker.images import IMAGE_GB, provide
from agent_rl.sandboxes.docker.lease import Lease
from agent_rl.sandboxes.docker.network import MEGABYTES, read_network
from agent_rl.sandboxes.docker.pod import NO_POD, Pod, Pods
from agent_rl.sandboxes.docker.runtime import check_engine, with_runtime
from agent_rl.sandboxes.docker.services import SECONDS
from agent_rl.sandboxes.docker.users import ContainerSandbox
from agent_rl.sandboxes.registry import register_sandbox

STARTS = 4
"""How many containers are started or removed at a time: more make an engine slower, not faster."""
MECHANISMS: Capabilities = {
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
class DockerSandboxes(AgentSandboxes):
    """Sandboxes that are containers of a Docker engine."""

    hint = "don't require it, or give the engine what it lacks, such as cgroups"

    def __init__(
        self,
        *,
        image: str = IMAGE,
        host: str | None = None,
        runtime: str | None = None,
        limits: Limits | None = None,
        require: Collection[str] = (),
        starts: int = STARTS,
        dockerfile: str | None = None,
        build_seconds: float = 600.0,
        image_gb: float = IMAGE_GB,
        network: Sequence[str] = (),
        network_private: bool = False,
        network_mb: float = MEGABYTES,
        compose: str | None = None,
        services_seconds: float = SECONDS,
    ) -> None:
        """Store the settings; the engine is reached when the first sandbox is opened.

        Args:
            image: needs a python3 (3.10 or newer); `agent-rl sandbox build-image` makes the default. One that is
                missing is pulled, with the credentials that `docker login` has left for this user.
            host: the engine's address; $DOCKER_HOST, or Docker's own default, if None.
            runtime: the engine's own if None; "runsc" is gVisor, "kata" or the like a small machine for each container.
            limits: of a sandbox that is opened without any.
            require: the guarantees that are tried before the first sandbox is opened; without them there is none.
            starts: how many containers may be started or removed at a time.
            dockerfile: a folder with a Dockerfile and what it copies: the image is built of it, once.
            build_seconds: that a step of the build may say nothing.
            image_gb: 10^9 bytes that the engine's images may take: of those that agent_rl has pulled or built the least
                recently used ones are removed beyond that, but none that was used within the hour.
            network: hosts that code may reach, by HTTP and HTTPS and through a proxy of ours, such as pypi.org or
                mirror.org:8080; none if empty.
            network_private: whether these may have addresses of private networks or of this machine.
            network_mb: 10^6 bytes that a sandbox may send and receive.
            compose: a compose file, whose services run beside each sandbox, each within a sandbox's limits. What it
                says of `main` or `client` is of the sandbox itself; an image or a Dockerfile that is given comes first.
            services_seconds: until services have to be healthy.

        Raises:
            ConfigError: if both an image and a Dockerfile are given, there is no such file, streams can't be attached
                to at that address, there is no such guarantee, `network` holds what is no host's name, the compose
                file says what is not supported, or these two can't be had with that runtime or engine.
        """
        super().__init__(limits, require)
        self.engine = Engine(host)
        self._source: Path | str
        if dockerfile is not None and image != IMAGE:
            raise ConfigError(f"docker: both image={image!r} and dockerfile={dockerfile!r}; give one")
        if dockerfile is not None and not Path(dockerfile, "Dockerfile").is_file():
            raise ConfigError(f"docker: dockerfile={dockerfile!r}: give a folder that has a Dockerfile")
        beside = None if compose is None else read_compose(Path(compose))
        if beside is not None and beside.main.source is not None and dockerfile is None and image == IMAGE:
            self._source = beside.main.source
        else:
            self._source = image if dockerfile is None else Path(dockerfile)
        self.image, self.runtime = image, runtime
        self._build_seconds, self._image_gb = build_seconds, image_gb
        self._pods = Pods(
            self.engine,
            read_network(network, network_private, network_mb),
            beside,
            seconds=services_seconds,
            images=self._provide,
            runtime=runtime,
        )
        self._etc = Etc(self.engine, runtime)
        self._is_provided = False
        """Whether the image was there when a sandbox was last opened."""
        self._threads = ThreadPoolExecutor(starts, thread_name_prefix="docker")
        self._closed = False
        self._tidy = False
        """Whether orphans were collected since the engine was last seen to fail."""
        self._left = set[str]()
        """Containers that the engine failed to remove: the next `open`, and `close`, try again."""

    async def claims(self) -> Capabilities:
        """Return what keeps each guarantee in a container of ours."""
        return {**MECHANISMS, **self._pods.claims}

    async def close(self) -> None:
        """Close every sandbox, and the connections to the engine."""
        self._closed = True
        await super().close()
        await asyncio.wrap_future(self._threads.submit(self._remove_left))
        await asyncio.to_thread(self._pods.close)
        self.engine.close()

    async def spawn(self, owner: str, limits: Limits, lifetime: float) -> ContainerSandbox:
        """Start a container."""
        if self._closed:
            raise SandboxError("this docker backend was closed")
        if not self._tidy:
            await asyncio.wrap_future(self._threads.submit(collect, self.engine))
            await asyncio.wrap_future(self._threads.submit(collect_files))
            self._tidy = True
            await asyncio.wrap_future(self._threads.submit(self._remove_left))
        user, expires = any_user(), time.monotonic() + lifetime
        starting = self._threads.submit(self._start, limits, owner, lifetime, user)
        try:
            container, stream, pod = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._drop)  # a thread can't be stopped
            raise
        remove = partial(self._remove_all, container, pod)
        lease = Lease(self.engine, self._threads, container, remove, user, pod.variables, expires)
        demultiplexer = Demultiplexer()
        sandbox = ContainerSandbox(
            stream,
            join=lease.join if self.runtime is None else None,
            name=owner or container[:12],
            expires=expires,
            kill=lease.give_up,
            ended=lease.ended,
            evidence=lease.evidence,
            decode=demultiplexer.feed,
        )
        try:
            async with self.starting(sandbox):
                await sandbox.ready(TIMEOUT)
        except (OSError, SandboxError) as error:  # a TimeoutError is one
            raise SandboxError(f"a container's agent did not start: {error} {demultiplexer.complaint}") from error
        return sandbox

    def _start(self, limits: Limits, owner: str, lifetime: float, user: int) -> tuple[str, socket.socket, Pod]:
        """Start a container; return its id, the stream to its agent, and what is beside it."""
        if not self._is_provided:
            check_engine(self.engine, self.runtime)
            self.image = self._provide(self._source)
            self._is_provided = True
        about = labels(owner, lifetime)
        container, pod = "", NO_POD
        try:
            pod = self._pods.open(self.image, limits, about, lifetime)
            with self._etc.create(
                self.image,
                ARGV,
                {**with_runtime(self.runtime, confinement(limits, user)), **pod.confinement},
                name=f"agent-rl-{uuid.uuid4().hex[:12]}",
                user=user,
                labels=about,
                working_dir="/",
                **pod.hostname,
            ) as container:
                first = greeting(lifetime, variables=pod.variables)
                return container, self.engine.start(container, first), pod
        except BaseException:
            self._is_provided = self._is_provided and container != ""  # another process may have removed it
            self._remove_all(container, pod)
            raise

    def _provide(self, source: Path | str) -> str:
        """Return the name of an image that the engine has then."""
        return provide(self.engine, source, seconds=self._build_seconds, gigabytes=self._image_gb)

    def _drop(self, started: Future[tuple[str, socket.socket, Pod]]) -> None:
        """Remove a container whose `open` was cancelled."""
        if not started.cancelled() and started.exception() is None:
            container, stream, pod = started.result()
            stream.close()
            self._remove_all(container, pod)

    def _remove_all(self, container: str, pod: Pod) -> str | None:
        """Remove a container and what is beside it, or say why not."""
        pod.let_go()
        said = [self._remove(each) for each in (container, *pod.containers) if each]
        return next((reason for reason in said if reason is not None), None)

    def _remove(self, container: str) -> str | None:
        """Remove a container, or say why not; its agent ends by itself where the engine can't be reached."""
        try:
            self.engine.remove(container)
        except SandboxError as error:
            self._tidy = False
            self._left.add(container)
            return str(error)
        self._left.discard(container)
        return None

    def _remove_left(self) -> None:
        for container in tuple(self._left):
            self._remove(container)
