"""The hosts that sandboxes may reach: the list's rules, and the process that keeps them, from the trainer's side."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_rl import errors
from agent_rl.errors import ConfigError, SandboxError

_log = logging.getLogger(__name__)

PORTS = (80, 443)
"""Of a host that is given without one."""
MEGABYTES = 1024.0
"""10^6 bytes that a sandbox may send and receive in all, by default."""
_NAME = re.compile(
    r"(?=.{1,253}(?::|$))([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*(:\d{1,5})?"
)
_RUN = "import sys; sys.path[:0] = {}; from agent_rl.sandboxes.docker.proxy import main; main()"
_END = 10.0
"""Seconds that the proxy has to end."""


@dataclass(frozen=True)
class Network:
    """What sandboxes may reach."""

    hosts: tuple[str, ...]
    """Names, each with a port or without."""
    allow_private: bool = False
    """Whether they may have addresses of private networks or of this machine."""
    megabytes: float = MEGABYTES

    @property
    def allowed(self) -> dict[str, list[int]]:
        """The ports by host."""
        found: dict[str, list[int]] = {}
        for host in self.hosts:
            name, _, port = host.partition(":")
            found.setdefault(name, []).extend([int(port)] if port else PORTS)
        return found


def read_network(hosts: Sequence[str], allow_private: bool, megabytes: float) -> Network | None:
    """Return what sandboxes may reach; None if there are no hosts.

    Raises:
        ConfigError: if a host is no name, such as an address, or there is no amount.
    """
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise ConfigError(f"docker: network={hosts!r}; give a list of hosts, such as [pypi.org,files.pythonhosted.org]")
    names = tuple(str(host).lower().removesuffix(".") for host in hosts)
    for name in names:
        host, _, port = name.partition(":")
        if not _NAME.fullmatch(name) or _is_address(host) or not 0 < int(port or 1) < 65536:
            raise ConfigError(f"docker: network: '{name}' is no host; give names, such as pypi.org or mirror.org:8080")
    if not megabytes > 0:
        raise ConfigError(f"docker: network_mb={megabytes}; give a number above 0")
    return Network(names, allow_private, megabytes) if names else None


def _is_address(host: str) -> bool:
    """Whether a host is an address, in any of the ways that the C library takes."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return re.fullmatch(r"(0x[0-9a-f]*|\d+)(\.(0x[0-9a-f]*|\d+))*", host) is not None


class ProxyProcess:
    """The process that lets sandboxes reach what they may. It ends when this one does, in whatever way.

    Raises:
        SandboxError: if it doesn't start.
    """

    def __init__(self, network: Network) -> None:
        root = [str(Path(errors.__file__).parents[1])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", _RUN.format(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                errors="backslashreplace",
            )
        except OSError as error:
            raise SandboxError(f"the proxy of the sandboxes' network does not start: {error}") from error
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(
                json.dumps({"allowed": network.allowed, "allow_private": network.allow_private}), file=stdin, flush=True
            )
        self.socket = stdout.readline().strip()
        """The path of the socket that it listens on."""
        if not self.socket.startswith("/"):
            complaint = f"{self.socket}\n{stdout.read()}".strip().splitlines()
            self.stop()
            raise SandboxError(f"the proxy of the sandboxes' network does not start: {''.join(complaint[-1:])}")
        self._following = threading.Thread(target=self._follow, name="docker-proxy", daemon=True)
        self._following.start()

    def runs(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it, and with it every connection."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if hasattr(self, "_following"):
            self._following.join()
        self._process.stdout.close()

    def _follow(self) -> None:
        """Log what it refuses: it says each once, and no more than so many."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            _log.warning("a sandbox was refused: %s", line.strip()[:500])
