"""The services beside a sandbox: containers of their own in its network, whose processes end with its keeper."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.docker.compose import Service
from agent_rl.sandboxes.docker.container import Demultiplexer, confinement
from agent_rl.sandboxes.docker.engine import Engine

SECONDS = 120.0
"""That services have until they are healthy, by default."""
_POLL = 0.1
_LAST = 5.0
"""Seconds for the last words of a service that has ended."""
_KEPT = 2000
"""Bytes of what a service printed last, for the message when it fails."""
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID"]
"""What the usual images need to set their folders up as root and go on as another user."""


@dataclass
class Running:
    """A service's container, while it starts."""

    container: str
    stream: socket.socket
    output: Demultiplexer = field(default_factory=Demultiplexer)
    said: bytes = b""

    def drain(self, seconds: float = 0.0) -> None:
        """Take what it printed, else it would have to wait; all of it, if it ends within so many seconds."""
        self.stream.settimeout(seconds)
        try:
            while data := self.stream.recv(65536):
                self.said = (self.said + self.output.feed(data))[-_KEPT:]
        except OSError:  # nothing more, for now
            return

    @property
    def complaint(self) -> str:
        """What it printed last."""
        return f"{self.said.decode(errors='backslashreplace')}{self.output.complaint}".strip()[-_KEPT:]


class Services:
    """Starts the services of one sandbox.

    Args:
        engine: where.
        keeper: the container whose namespaces they join.
        limits: of each.
        labels: of each.
        seconds: until all have to be as others need them.
    """

    def __init__(self, engine: Engine, keeper: str, limits: Limits, labels: Mapping[str, str], seconds: float) -> None:
        self._engine, self._keeper, self._limits, self._labels = engine, keeper, limits, labels
        self._until = time.monotonic() + seconds
        self.running: dict[str, Running] = {}

    @property
    def containers(self) -> tuple[str, ...]:
        """Those that were started."""
        return tuple(service.container for service in self.running.values())

    def start(self, service: Service, image: str) -> None:
        """Start a service, when those that it depends on are as it needs them.

        Raises:
            SandboxError: if it can't be started, or one of those is not in time.
        """
        self.wait(service.after)
        about = self._engine.about_image(image)["Config"]
        config = dict(service.config)
        if service.healthcheck is not None:
            config["healthcheck"] = dict(service.healthcheck)
        container = self._engine.create(
            image,
            None,
            self._confinement((*(about.get("Volumes") or ()), *service.tmpfs)),
            name=f"agent-rl-{service.name}-{uuid.uuid4().hex[:12]}",
            labels=dict(self._labels),
            environment=dict(service.environment),
            **config,
        )
        try:
            stream = self._engine.start(container)
        except BaseException:
            self._engine.remove(container)
            raise
        self.running[service.name] = Running(container, stream)

    def wait(self, conditions: Mapping[str, str]) -> None:
        """Wait until services are as they have to be.

        Raises:
            SandboxError: if one ends, or is not in time.
        """
        while waiting := [name for name, condition in conditions.items() if not self._is(name, condition)]:
            if time.monotonic() > self._until:
                name = waiting[0]
                raise SandboxError(f"the service '{name}' is not healthy in time: {self.running[name].complaint}")
            time.sleep(_POLL)

    def let_go(self) -> None:
        """Leave them to themselves."""
        for service in self.running.values():
            service.stream.close()

    def _is(self, name: str, condition: str) -> bool:
        """Whether a service is as it has to be."""
        for each in self.running.values():
            each.drain()
        state = self._engine.state(self.running[name].container)
        if not state.get("Running"):
            self.running[name].drain(_LAST)
            status = f" with status {state['ExitCode']}" if "ExitCode" in state else ""
            raise SandboxError(f"the service '{name}' has ended{status}: {self.running[name].complaint}")
        if condition != "service_healthy":
            return True
        if "Health" not in state:
            raise SandboxError(f"the service '{name}' has no healthcheck, so that it can't be waited for")
        if state["Health"]["Status"] == "unhealthy":
            raise SandboxError(f"the service '{name}' is not healthy: {self.running[name].complaint}")
        return bool(state["Health"]["Status"] == "healthy")

    def _confinement(self, folders: tuple[str, ...]) -> dict[str, object]:
        """Return the host configuration of a service, which writes to these folders."""
        limits = self._limits
        written = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk},nr_inodes={limits.files}"
        return {
            **confinement(limits, 0),
            "NetworkMode": f"container:{self._keeper}",
            "PidMode": f"container:{self._keeper}",  # so that the kernel ends it when the keeper ends
            "CapAdd": _CAPABILITIES,
            "Tmpfs": dict.fromkeys(("/tmp", "/run", "/dev/shm", *folders), written),
        }
