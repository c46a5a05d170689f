"""Containers without a network, created in the way that costs an engine least.

`NetworkMode: none` is a network to the engine: for each container it runs a program that connects it to nothing, which
takes half of a start (Docker 20.10: 0.25 of 0.4 s). `NetworkDisabled` gives the same network namespace, in which there
is loopback and nothing else, without one. What it lacks is the line of /etc/hosts that names `localhost`. So a file
with that is mounted, one for each container: a file that several have is one that they can lock against each other.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.docker.engine import Engine

HOSTS = b"127.0.0.1\tlocalhost\n"
PREFIX = "agent-rl-hosts-"
_NOT_THERE = "bind source path does not exist"
_LEFT = 3600.0
"""Seconds after which the file of a process that was killed is removed: no start takes that long."""


class Loopback:
    """Creates containers of an engine; those without a network by the shorter way, where that can be had.

    Args:
        engine: where.
        runtime: the containers', None: the engine's own. Others may want the engine's network.
    """

    def __init__(self, engine: Engine, runtime: str | None) -> None:
        self._engine = engine
        self._is_short: bool | None = None if runtime is None and engine.host.startswith("unix://") else False
        """None: it is not known yet. The engine has to see our files, and SELinux would hide them from a container."""

    @contextlib.contextmanager
    def create(self, image: str, argv: list[str], host_config: Mapping[str, object], **config: object) -> Iterator[str]:
        """Create a container, which is started within the context; arguments and errors are `Engine.create`'s."""
        with contextlib.ExitStack() as stack:
            container = None
            if host_config["NetworkMode"] == "none" and self._short():
                mounts = {"Mounts": [stack.enter_context(_hosts())]}
                try:
                    container = self._engine.create(
                        image, argv, {**host_config, **mounts}, network_disabled=True, **config
                    )
                except SandboxError as error:
                    if _NOT_THERE not in str(error):
                        raise
                    self._is_short = False  # the engine has other files than this process
            yield container or self._engine.create(image, argv, host_config, **config)

    def _short(self) -> bool:
        if self._is_short is None:
            self._is_short = not self._engine.has_selinux()
        return self._is_short


@contextlib.contextmanager
def _hosts() -> Iterator[Mapping[str, object]]:
    """Make a file for one container; return its mount, which holds the file once the container has started."""
    fd, name = tempfile.mkstemp(prefix=PREFIX)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(HOSTS)
            os.fchmod(fd, 0o644)
        yield {"Type": "bind", "Source": name, "Target": "/etc/hosts", "ReadOnly": True}
    finally:
        Path(name).unlink(missing_ok=True)


def collect_hosts() -> None:
    """Remove the files of processes that were killed while they started a container."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if file.stat().st_mtime < time.time() - _LEFT:
                file.unlink()
