"""Sandboxes on other machines, opened where the most places are free.

    sandboxes = RemoteSandboxes(["https://one:8001", "https://two:8001"])

Each machine runs `agent-rl sandbox serve`. This process has one connection to each, for all of its sandboxes: when it
ends, however it does, the servers close them. Between calls a sandbox belongs to no event loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from agent_rl.core.meter import wait_uncounted
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import ConfigError, RemoteError, SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.registry import register_sandbox
from agent_rl.sandboxes.remote import wire
from agent_rl.sandboxes.remote.sandbox import RemoteSandbox, give_back
from agent_rl.sandboxes.remote.wire import Reply
from agent_rl.serving.link import Connection, Link, next_call

REST = 10.0
"""Seconds that a server is left alone after it did not answer, as long as others do."""
MAX_WAIT = 3600.0


@functools.cache
def _connection(url: str, token: str | None, ca: str, process: int) -> Connection[Reply]:
    """Return a process's connection to a server: threads don't survive a fork."""
    return Connection(f"{url}{wire.PATH}", wire.load_reply, "agent-rl sandbox serve", token=token, ca=ca)


@dataclass(eq=False)
class _Server:
    """What is known of a server."""

    url: str
    taken: int = 0
    """Of its places, as it last said, with those that are being asked for."""
    capacity: int = 1
    rests_until: float = 0.0

    def tell(self, reply: Reply) -> None:
        """Take the counts from a reply."""
        if reply.taken is not None and reply.capacity is not None:
            self.taken, self.capacity = reply.taken, reply.capacity


@register_sandbox("remote")
class RemoteSandboxes:
    """Opens sandboxes on servers; limits and guarantees are those of the backend there.

    Args:
        url: a server's address, such as https://HOST:8001, or several.
        token: what they want to hear; $AGENT_RL_SERVER_TOKEN if None, so that it is in no config.
        ca: a PEM file of the certificates that may vouch for theirs; those of the system if empty.
        limits: of a sandbox that is opened without any; the server's own if None.
        wait: seconds that `open` waits for a place to get free where all are taken, at most.

    Raises:
        ConfigError: if an address is none.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | None = None,
        ca: str = "",
        limits: Limits | None = None,
        wait: float = 60.0,
    ) -> None:
        urls = [url] if isinstance(url, str) else list(url)
        for each in urls:
            parts = urlsplit(each)
            if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
                raise ConfigError(f"'{each}' is no address of a server of sandboxes: write https://HOST:PORT")
        if not urls or len(set(urls)) < len(urls):
            raise ConfigError(f"url={urls}: give one address, or some that differ")
        if not 0 <= wait <= MAX_WAIT:
            raise ConfigError(f"wait={wait}: give 0 to {MAX_WAIT:g} seconds")
        self._servers = [_Server(each.rstrip("/")) for each in urls]
        self._token, self._ca, self._limits, self._wait = token, ca, limits, wait
        self._turn = itertools.count(os.getpid())
        """So that processes that know nothing of the load don't all begin with the same server."""
        self._open: weakref.WeakSet[RemoteSandbox] = weakref.WeakSet()

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> RemoteSandbox:
        """Open a sandbox on the server with the most free places; wait for one if all are full.

        Raises:
            SandboxError: if no server gives one.
            ConfigError: if one wants another token.
        """
        failures: dict[str, str] = {}
        rounds = (self._wait,) if len(self._servers) == 1 else (0.0, self._wait)
        for wait in rounds:
            for server in self._by_load():
                try:
                    return await self._open_at(server, owner, limits or self._limits, lifetime, wait)
                except (RemoteError, SandboxError) as error:
                    failures[server.url] = str(error)
                    if wait and not server.rests_until > time.monotonic():  # it was waited for long enough
                        break
        reason = "; ".join(f"{url}: {why}" for url, why in failures.items())
        raise SandboxError(f"no sandbox could be opened: {reason}", SandboxLoss(Cause.NOT_OPENED, reason))

    async def capabilities(self) -> Capabilities:
        """Return what all servers that answer guarantee, found by trying there; each mechanism with its "or"s.

        Raises:
            SandboxError: if none answers.
        """
        asked = await asyncio.gather(*map(self._capabilities_of, self._servers), return_exceptions=True)
        found = [each for each in asked if not isinstance(each, BaseException)]
        if not found:
            failures = [str(each) for each in asked]
            raise SandboxError(f"no server of sandboxes says what it guarantees: {'; '.join(failures)}")
        kept: dict[Guarantee, str | None] = {}
        for guarantee in Guarantee:
            mechanisms = [each.get(guarantee) for each in found]
            kept[guarantee] = None if None in mechanisms else " or ".join(sorted({str(each) for each in mechanisms}))
        return kept

    async def close(self) -> None:
        """Close every sandbox that is still open; the connections stay, for other backends of this process."""
        await asyncio.gather(*(sandbox.close() for sandbox in tuple(self._open)), return_exceptions=True)

    def _by_load(self) -> list[_Server]:
        """Return the servers, the least loaded first, in turn where they are equal; who rests only if all do."""
        first = next(self._turn) % len(self._servers)
        turned = self._servers[first:] + self._servers[:first]
        now = time.monotonic()
        awake = [server for server in turned if server.rests_until <= now]
        return sorted(awake or turned, key=lambda server: server.taken / server.capacity)

    async def _link(self, server: _Server) -> Link[Reply]:
        connection = _connection(server.url, self._token, self._ca, os.getpid())
        try:
            link = await connection.link()
        except RemoteError:
            server.rests_until = time.monotonic() + REST
            raise
        server.rests_until = 0.0
        return link

    async def _open_at(
        self, server: _Server, owner: str, limits: Limits | None, lifetime: float, wait: float
    ) -> RemoteSandbox:
        server.taken += 1
        link = await self._link(server)
        lease = secrets.token_hex(8)
        opening = wire.Open(
            op="open", call=next_call(), lease=lease, owner=owner, limits=limits, lifetime=lifetime, wait=wait
        )
        try:
            server.tell(await wait_uncounted(link.connection.run(link, opening)))  # mostly for a place
        except BaseException:
            if link.lost:
                server.rests_until = time.monotonic() + REST
            give_back(link, lease)  # it may have been opened while we were cancelled
            raise
        sandbox = RemoteSandbox(link, lease, server.tell)
        self._open.add(sandbox)
        return sandbox

    async def _capabilities_of(self, server: _Server) -> Capabilities:
        link = await self._link(server)
        reply = await link.connection.run(link, wire.Capabilities(op="capabilities", call=next_call()))
        return reply.capabilities or {}
