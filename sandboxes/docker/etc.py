"""Files of a container's own in /etc, mounted: those that name its users, and `localhost`.

A container's users have numbers that are drawn for it, which no image knows, and its root can't be written. So its
/etc/passwd and /etc/group are files of the host's: the image's own lines, after those of its users.

`NetworkMode: none` is a network to the engine: for each container it runs a program that connects it to nothing, which
takes half of a start (Docker 20.10: 0.25 of 0.4 s). `NetworkDisabled` gives the same network namespace, in which there
is loopback and nothing else, without one. What it lacks is the line of /etc/hosts that names `localhost`: that is
mounted, too.

Each container has files of its own: one that several have is one that they can lock against each other.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.calls import WORK
from agent_rl.sandboxes.docker.container import MAX_USERS, uid_of
from agent_rl.sandboxes.docker.engine import Engine

HOSTS = b"127.0.0.1\tlocalhost\n"
PASSWD, GROUP = "/etc/passwd", "/etc/group"
USER = "sandbox"
"""The name of a container's first user; the others have a number behind it."""
PREFIX = "agent-rl-etc-"
_NOT_THERE = "bind source path does not exist"
_LEFT = 3600.0
"""Seconds after which the file of a process that was killed is removed: no start takes that long."""


class Etc:
    """Creates containers of an engine with files of their own, where it sees ours.

    Args:
        engine: where.
        runtime: the containers', None: the engine's own. Others may want the engine's network.
    """

    def __init__(self, engine: Engine, runtime: str | None) -> None:
        self._engine, self._runtime = engine, runtime
        self._sees: bool | None = None if engine.host.startswith("unix://") else False
        """None: it is not known yet. The engine has to see our files, and SELinux would hide them from a container."""
        self._of_images: dict[str, Mapping[str, bytes]] = {}
        """What images have of the files that name users."""
        self._looking = threading.Lock()

    @contextlib.contextmanager
    def create(
        self,
        image: str,
        argv: list[str],
        host_config: Mapping[str, object],
        *,
        user: int,
        labels: Mapping[str, str],
        **config: object,
    ) -> Iterator[str]:
        """Create a container, which is started within the context.

        Args:
            image: its name.
            argv: as `Engine.create` has it, and so the rest.
            host_config: without mounts.
            user: the number of the container's first user.
            labels: also of the container that an image's files are read by.
            config: without a user.
        """
        config |= {"user": f"{user}:{user}", "labels": dict(labels)}
        with contextlib.ExitStack() as stack:
            container = None
            if self._can_see():
                is_short = self._runtime is None and host_config["NetworkMode"] == "none"
                files = {**self._naming(image, user, labels), **({"/etc/hosts": HOSTS} if is_short else {})}
                mounts = [stack.enter_context(_mounted(path, data)) for path, data in files.items()]
                try:
                    container = self._engine.create(
                        image, argv, {**host_config, "Mounts": mounts}, network_disabled=is_short, **config
                    )
                except SandboxError as error:
                    if _NOT_THERE not in str(error):
                        raise
                    self._sees = False  # the engine has other files than this process
            yield container or self._engine.create(image, argv, host_config, **config)

    def _can_see(self) -> bool:
        if self._sees is None:
            self._sees = not self._engine.has_selinux()
        return self._sees

    def _naming(self, image: str, user: int, labels: Mapping[str, str]) -> Mapping[str, bytes]:
        """Return the files that name a container's users, by path: the image's, with these before all others."""
        with self._looking:
            if image not in self._of_images:
                self._of_images[image] = self._engine.image_files(image, (PASSWD, GROUP), labels)
        passwd, group = "", ""
        for number in range(MAX_USERS + 1):
            name, uid = f"{USER}{number or ''}", uid_of(user, number)
            # the home of another one is not known yet, and that of the first is the first's to write
            passwd += f"{name}:x:{uid}:{uid}::{'/' if number else WORK}:/bin/sh\n"
            group += f"{name}:x:{uid}:\n"
        theirs = self._of_images[image]
        return {PASSWD: passwd.encode() + theirs[PASSWD], GROUP: group.encode() + theirs[GROUP]}


@contextlib.contextmanager
def _mounted(path: str, data: bytes) -> Iterator[Mapping[str, object]]:
    """Make a file for one container; return its mount, which holds the file once the container has started."""
    fd, name = tempfile.mkstemp(prefix=PREFIX)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(data)
            os.fchmod(fd, 0o644)
        yield {"Type": "bind", "Source": name, "Target": path, "ReadOnly": True}
    finally:
        with contextlib.suppress(OSError):  # `collect_files` tries again: a container that has started goes on
            Path(name).unlink()


def collect_files() -> None:
    """Remove the files of processes that were killed while they started a container."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if file.stat().st_mtime < time.time() - _LEFT:
                file.unlink()
