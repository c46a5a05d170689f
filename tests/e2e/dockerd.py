"""A Docker engine of the tests' own: with its own data, sockets and processes, and without a network."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from agent_rl.sandboxes.docker import Engine
from agent_rl.sandboxes.docker.container import PROCESS
from tests.debian import has_program

OPTIONS = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")


class Dockerd:
    """A running engine; `restart` is for tests of what happens to its clients."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.host = f"unix://{folder}/docker.sock"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start it, up to four times: leftovers of a killed one can make a start fail."""
        for _ in range(4):
            if (process := self._try_to_start()) is not None:
                return process
        raise RuntimeError(f"dockerd did not start:\n{(self.folder / 'log').read_text()[-2000:]}")

    def _try_to_start(self) -> subprocess.Popen[bytes] | None:
        (self.folder / "pid").unlink(missing_ok=True)
        at = self.folder
        where = ("--host", self.host, "--data-root", at / "data", "--exec-root", at / "exec", "--pidfile", at / "pid")
        with (at / "log").open("ab") as log:
            process = subprocess.Popen(
                ["dockerd", *where, *OPTIONS, *self.options, "--log-level=warn"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"{at}/docker.sock")  # it listens before it answers
                probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                if b"200 OK" in probe.recv(100):
                    return process
            time.sleep(0.05)
        process.kill()
        process.wait()
        return None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the engine, and its containers; SIGKILL leaves them to the next start."""
        self.process.send_signal(how)
        self.process.wait(timeout=30)

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.stop(how)
        self.process = self._start()


def whats_missing() -> str | None:
    """Return the obstacle to an engine here, if any; on CI, Debian's package is installed first."""
    if os.geteuid() != 0:
        return "a Docker engine of our own takes root"
    is_there = has_program("dockerd", package="docker.io")
    return None if is_there else "dockerd is missing: apt-get install docker.io"


def is_empty(engine: Engine) -> bool:
    """Whether no container of ours is left after a while."""
    until = time.monotonic() + 15
    while (left := engine.labelled(PROCESS)) and time.monotonic() < until:
        time.sleep(0.05)
    return not left


@contextlib.contextmanager
def docker_engine(folder: Path, *options: str) -> Iterator[Dockerd]:
    """Run an engine in a folder whose path is short enough for a socket's."""
    engine = Dockerd(folder, *options)
    try:
        yield engine
    finally:
        engine.stop()
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """Unmount leftovers of an engine; otherwise its folder can't be removed."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed([point for point in mounted if Path(point).is_relative_to(folder)]):
        subprocess.run(["umount", "--lazy", point], check=True)
