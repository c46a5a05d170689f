"""What runs beside a sandbox's container, in one network with it that reaches nothing else: its keeper.

A sandbox that may reach hosts has a second container of the same image, the keeper. The network namespace is the
keeper's, is empty but for loopback, and the sandbox joins it. The proxy's socket is mounted into the keeper alone,
which relays to it what connects to a port of loopback: code in the sandbox never gets to a socket of the host's, which
could carry descriptors. A network of the engine's would do less: on one that is `internal`, too, the host's own address
answers, with whatever listens there.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.docker import keeper
from agent_rl.sandboxes.docker.container import Demultiplexer, any_user, confinement
from agent_rl.sandboxes.docker.engine import TIMEOUT, Engine
from agent_rl.sandboxes.docker.network import Network, ProxyProcess

PORT = 3128
"""Where the keeper listens, on loopback."""
_KEEPER = Path(keeper.__file__).read_text()
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
        runtime: of the backend.

    Raises:
        ConfigError: if the engine is not on this machine, or the runtime not its own.
    """

    def __init__(self, engine: Engine, network: Network | None, runtime: str | None) -> None:
        if network is not None and not engine.host.startswith("unix://"):
            raise ConfigError(f"docker: network= takes an engine on this machine, at unix://..., not {engine.host}")
        if network is not None and runtime is not None:
            raise ConfigError(f"docker: runtime={runtime!r} shares no network between containers; leave network= out")
        self._engine, self._network = engine, network
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
            limits: of the sandbox.
            labels: of every container.
            lifetime: seconds until it ends by itself.

        Raises:
            SandboxError: if that fails.
        """
        if self._network is None:
            return NO_POD
        return self._start_keeper(image, labels, lifetime, self._network)

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

    def _start_keeper(self, image: str, labels: Mapping[str, str], lifetime: float, network: Network) -> Pod:
        user = any_user()
        arguments = (lifetime, PORT, int(network.megabytes * 1e6))
        keeper = self._engine.create(
            image,
            ["python3", "-I", "-S", "-B", "-c", _KEEPER, *map(str, arguments)],
            {**confinement(_LIMITS, user), "Binds": [f"{self._socket(network)}:{_PROXY}:ro"]},
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
        return Pod(_variables(), (keeper,), stream)


_PROXY = keeper.PROXY


def _variables() -> dict[str, str]:
    """Return the variables by which programs find a proxy."""
    places = {"http_proxy": f"http://127.0.0.1:{PORT}", "https_proxy": f"http://127.0.0.1:{PORT}"}
    places["no_proxy"] = "localhost,127.0.0.1,::1"
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
