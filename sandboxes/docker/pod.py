"""What runs beside a sandbox's container, in one network with it that reaches nothing else: its keeper.

A sandbox that may reach hosts, or has services, has a second container of the same image, the keeper. The network
namespace is the keeper's, is empty but for loopback, and the sandbox joins it. The proxy's socket is mounted into the
keeper alone, which relays to it what connects to a port of loopback: code in the sandbox never gets to a socket of the
host's, which could carry descriptors. A network of the engine's would do less: on one that is `internal`, too, the
host's own address answers, with whatever listens there.

Services are containers that join the network and the keeper's PID namespace: the kernel ends them when the keeper ends,
which it does with the trainer, whatever becomes of that. All have one loopback, where they are found by their names.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.docker import keeper
from agent_rl.sandboxes.docker.compose import Compose
from agent_rl.sandboxes.docker.container import Demultiplexer, any_user, confinement
from agent_rl.sandboxes.docker.engine import TIMEOUT, Engine
from agent_rl.sandboxes.docker.network import Network, ProxyProcess
from agent_rl.sandboxes.docker.services import Services

PORT = 3128
"""Where the keeper listens, on loopback."""
_KEEPER = Path(keeper.__file__).read_text(encoding="utf-8")
_LIMITS = Limits(memory=96 << 20, processes=8, disk=1 << 20, files=64)
"""Of a keeper: 32 connections hold 256 KiB each way at most."""


@dataclass(frozen=True)
class Pod:
    """What is beside one sandbox."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """For the code in the sandbox."""
    containers: tuple[str, ...] = ()
    """To be removed with the sandbox; the last is the keeper."""
    held: socket.socket | None = None
    """The keeper's stdin: it ends with this."""

    @property
    def confinement(self) -> Mapping[str, str]:
        """What is different in the host configuration of the sandbox's container."""
        return {"NetworkMode": f"container:{self.containers[-1]}"} if self.containers else {}

    @property
    def hostname(self) -> Mapping[str, str]:
        """The sandbox's, unless its network has one already."""
        return {} if self.containers else {"hostname": "sandbox"}

    def let_go(self) -> None:
        """End it; its containers are still to be removed."""
        if self.held is not None:
            self.held.close()


NO_POD = Pod()


class Pods:
    """What is beside the sandboxes of a backend.

    Args:
        engine: where.
        network: what they may reach.
        compose: their services.
        seconds: until services have to be healthy.
        images: provides the services' images: returns the name of one, of a folder or another name.

    Raises:
        ConfigError: if the engine is not on this machine, or the runtime not its own.
    """

    def __init__(
        self,
        engine: Engine,
        network: Network | None,
        compose: Compose | None,
        *,
        seconds: float,
        images: Callable[[Path | str], str],
        runtime: str | None,
    ) -> None:
        if network is not None and not engine.host.startswith("unix://"):
            raise ConfigError(f"docker: network= takes an engine on this machine, at unix://..., not {engine.host}")
        self._is_needed = network is not None or compose is not None
        if self._is_needed and runtime is not None:
            raise ConfigError(f"docker: runtime={runtime!r} shares no network: leave network= and compose= out")
        self._engine, self._network, self._compose = engine, network, compose
        self._seconds, self._images = seconds, images
        self._proxy: ProxyProcess | None = None
        self._starting = threading.Lock()

    @property
    def claims(self) -> Capabilities:
        """What keeps guarantees otherwise than in a sandbox alone."""
        if self._network is None:
            return {}
        return {Guarantee.NETWORK: f"empty network namespace, seccomp, proxy to {len(self._network.allowed)} hosts"}

    def open(self, image: str, limits: Limits, labels: Mapping[str, str], lifetime: float) -> Pod:
        """Start what is to be beside a sandbox; nothing is left of it where that fails.

        Args:
            image: of the sandbox.
            limits: of the sandbox, and of each service.
            labels: of every container.
            lifetime: seconds until it ends by itself.

        Raises:
            SandboxError: if that fails.
        """
        if not self._is_needed:
            return NO_POD
        pod = self._start_keeper(image, labels, lifetime)
        if self._compose is None:
            return pod
        services = Services(self._engine, pod.containers[-1], limits, labels, self._seconds)
        try:
            for service in self._compose.services:
                services.start(service, self._images(service.source or ""))
            services.wait(self._compose.main.after)
        except BaseException:
            pod.let_go()
            for container in (*services.containers, *pod.containers):
                with contextlib.suppress(SandboxError):
                    self._engine.remove(container)
            raise
        finally:
            services.let_go()
        return replace(pod, containers=(*services.containers, *pod.containers))

    def close(self) -> None:
        """End the proxy."""
        with self._starting:
            if self._proxy is not None:
                self._proxy.stop()
                self._proxy = None

    def _socket(self, network: Network) -> str:
        """Return the path of the proxy's socket; it is started if it doesn't run."""
        with self._starting:
            if self._proxy is not None and not self._proxy.runs():
                self._proxy.stop()
                self._proxy = None
            self._proxy = self._proxy or ProxyProcess(network)
            return self._proxy.socket

    def _start_keeper(self, image: str, labels: Mapping[str, str], lifetime: float) -> Pod:
        user, network = any_user(), self._network
        port, most = (0, 0) if network is None else (PORT, int(network.megabytes * 1e6))
        names = () if self._compose is None else tuple(service.name for service in self._compose.services)
        keeper = self._engine.create(
            image,
            ["python3", "-I", "-S", "-B", "-c", _KEEPER, str(lifetime), str(port), str(most)],
            {
                **confinement(_LIMITS, user),
                "Binds": [] if network is None else [f"{self._socket(network)}:{_PROXY}:ro"],
                "ExtraHosts": [f"{name}:127.0.0.1" for name in names],
            },
            name=f"agent-rl-net-{uuid.uuid4().hex[:12]}",
            user=f"{user}:{user}",
            labels=dict(labels),
            working_dir="/",
            hostname="sandbox",
        )
        stream: socket.socket | None = None
        try:
            stream = self._engine.start(keeper)
            _await_ready(stream)
        except BaseException:
            if stream is not None:
                stream.close()
            with contextlib.suppress(SandboxError):
                self._engine.remove(keeper)
            raise
        variables = {} if network is None else _variables(names)
        given = {} if self._compose is None else self._compose.main.environment
        return Pod({**variables, **given}, (keeper,), stream)


_PROXY = keeper.PROXY


def _variables(names: Sequence[str]) -> dict[str, str]:
    """Return the variables by which programs find a proxy, and what they reach without."""
    places = {"http_proxy": f"http://127.0.0.1:{PORT}", "https_proxy": f"http://127.0.0.1:{PORT}"}
    places["no_proxy"] = ",".join(("localhost", "127.0.0.1", "::1", *names))
    return places | {name.upper(): value for name, value in places.items()}


def _await_ready(stream: socket.socket) -> None:
    """Wait until a keeper says that it listens.

    Raises:
        SandboxError: if it doesn't.
    """
    output, said = Demultiplexer(), b""
    stream.settimeout(TIMEOUT)
    try:
        while not said.endswith(keeper.READY):
            data = stream.recv(4096)
            said += output.feed(data)
            if not data:
                raise SandboxError(f"the network of a sandbox did not start: {output.complaint}")
    except OSError as error:
        raise SandboxError(f"the network of a sandbox did not start: {error}") from error
