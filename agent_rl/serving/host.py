"""The server's side: who may connect, which calls are under way, which leases a client holds, and how they end.

A client has one connection for all of its leases. A connection that ends, or doesn't answer pings, frees all places of
its client; a lease that is not used for its time to live is freed, too. Each is cleared before it is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import ssl
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar, Generic

from agent_rl.core.sandbox_loss import loss_told_by
from agent_rl.errors import ConfigError, RemoteError, kind_of
from agent_rl.serving import frames
from agent_rl.serving.frames import LOCAL, TOKEN, Problem, Reply
from agent_rl.serving.leases import L, Leases, Owner

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request as Handshake
    from websockets.http11 import Response

_log = logging.getLogger(f"websockets.{__name__}")
"""Of the connections; below websockets' own, whose errors are printed where nobody set up logging."""
_log.addFilter(lambda record: record.msg != "opening handshake failed")  # who came with TLS, or looks for open ports
ANY = ("", "0.0.0.0", "::")
"""Hosts that stand for all addresses of this machine; none that a client elsewhere could connect to."""
MAX_CALLS = 16_384
"""That a client may wait for at a time."""
MAX_HELD = 16 * frames.MAX_BYTES
"""Bytes of the requests among them, beyond which no further one is taken."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server serves."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 for any that is free."""
    capacity: int = 1024
    """Leases at a time."""
    ttl: float = 3600.0
    """Seconds that a lease may wait for its client's next call."""
    wait: float = 60.0
    """Seconds that a client waits for a place before it is refused."""
    ping: float = 20.0
    """Seconds between pings of a connection, and until one that was not answered ends it."""
    token: str = ""
    """What clients have to know."""
    tls_cert: str = ""
    """The PEM file of the server's certificate, and those that vouch for it; without one there is no TLS."""
    tls_key: str = ""
    """The PEM file of its private key, if that is not in the other."""
    plain: bool = True
    """Whether other machines may come without TLS, as from a proxy that has it."""

    def __post_init__(self) -> None:
        for name in ("capacity", "ttl", "wait", "ping"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name}={value}: give a positive number")
        if self.tls_key and not self.tls_cert:
            raise ConfigError(f"--tls-key={self.tls_key}: give --tls-cert, too")
        if self.host in LOCAL:
            return
        if not self.token:
            raise ConfigError(
                f"host={self.host} lets other machines in: set {TOKEN} here and where the clients run, "
                "to a secret of your own"
            )
        if not (self.plain or self.tls_cert):
            raise ConfigError(
                f"host={self.host} lets other machines in, and the token would pass as plain text: give --tls-cert and "
                "--tls-key, or say --plain where a proxy has TLS or the network is yours alone"
            )

    def context(self) -> ssl.SSLContext | None:
        """Return what TLS needs; None without a certificate.

        Raises:
            ConfigError: if the files can't be used.
        """
        if not self.tls_cert:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key or None)
        except OSError as error:  # an SSLError is one
            raise ConfigError(f"the certificate {self.tls_cert} {self.tls_key} can't be used: {error}") from error
        return context


@contextlib.asynccontextmanager
async def hosting(host: Host[L]) -> AsyncGenerator[str, None]:
    """Serve as long as the context lasts; yield the server's address.

    Raises:
        ConfigError: if websockets is not installed, or the address or the certificate can't be used.
    """
    frames.require_websockets()
    from websockets.asyncio.server import serve

    settings = host.settings
    context = settings.context()
    try:
        listening = await serve(
            host.connected,
            settings.host,
            settings.port,
            ssl=context,
            process_request=host.admit,
            origins=[None],  # a page in a browser names its own, and is no client
            compression=None,
            max_size=frames.MAX_BYTES,
            ping_interval=settings.ping,
            ping_timeout=settings.ping,
            close_timeout=settings.ping,
            server_header=None,
            logger=_log,
        )
    except OSError as error:
        raise ConfigError(f"{settings.host}:{settings.port} can't be served on: {error}") from error
    sweeping = asyncio.create_task(host.sweep())
    try:
        async with listening:
            machine = socket.gethostname() if settings.host in ANY else settings.host
            name = f"[{machine}]" if ":" in machine else machine
            yield f"{'https' if context else 'http'}://{name}:{next(iter(listening.sockets)).getsockname()[1]}"
    finally:
        sweeping.cancel()


class Host(ABC, Generic[L]):
    """What is served, and the clients."""

    path: ClassVar[str]
    """Where it takes connections."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.leases: Leases[L] = Leases(settings.capacity, settings.ttl)
        self.clients: set[Owner[L]] = set()
        self.expired = self.lost = 0
        """Leases that ran out, and that lost their client."""
        self._started = time.monotonic()

    @abstractmethod
    def about(self) -> Mapping[str, object]:
        """Return what is served, for `GET /health`, which asks for no token."""

    @abstractmethod
    async def reply(self, owner: Owner[L], data: str | bytes) -> Reply:
        """Do what a request wants."""

    @abstractmethod
    async def clear(self, lease: L) -> None:
        """End what is in the place of a lease."""

    def failure(self, call: int, error: BaseException) -> Reply:
        """Return the reply to a call that failed."""
        return Reply(call=call, error=problem(error))

    def health(self) -> dict[str, object]:
        """Return the counts that `GET /health` answers with."""
        leases = self.leases
        return {
            **self.about(),
            "capacity": leases.capacity,
            "taken": leases.taken,
            "waiting": leases.waiting,
            "clients": len(self.clients),
            "opened": leases.opened,
            "refused": leases.refused,
            "expired": self.expired,
            "lost": self.lost,
            "seconds": round(time.monotonic() - self._started, 1),
        }

    async def admit(self, connection: ServerConnection, request: Handshake) -> Response | None:
        """Answer plain HTTP, and refuse who doesn't know the token."""
        path = request.path.partition("?")[0]
        if path == "/health":
            return connection.respond(HTTPStatus.OK, json.dumps(self.health()) + "\n")
        if path != self.path:
            return connection.respond(HTTPStatus.NOT_FOUND, f"there are /health and {self.path}, a WebSocket\n")
        given = ", ".join(request.headers.get_all("Authorization")).encode()
        if self.settings.token and not hmac.compare_digest(given, f"Bearer {self.settings.token}".encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, f"set {TOKEN} to the server's\n")
        return None

    async def connected(self, socket: ServerConnection) -> None:
        """Answer a client until its connection ends; then free what it held."""
        from websockets.exceptions import ConnectionClosed

        frames.bound_sending(socket, self.settings.ping)
        owner: Owner[L] = Owner()
        self.clients.add(owner)
        try:
            async for data in socket:
                await self._take(owner, socket, data)
        except ConnectionClosed:
            pass  # without a goodbye
        finally:
            try:
                for answer in tuple(owner.calls.values()):
                    answer.cancel()
                left = list(owner.leases.values())
                self.lost += len(left)
                await asyncio.gather(*map(self.release, left), return_exceptions=True)
            finally:
                self.clients.remove(owner)

    async def sweep(self) -> None:
        """Free the leases that run out, until cancelled."""
        while True:
            await asyncio.sleep(min(self.settings.ttl / 4, 5.0))
            overdue = self.leases.overdue()
            self.expired += len(overdue)
            await asyncio.gather(*map(self.release, overdue), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def opening(self, lease: L, wait: float) -> AsyncGenerator[None, None]:
        """Give a new lease a place, and take it back if what is put there fails.

        Raises:
            RemoteError: if the client has one of that id, or no place gets free.
        """
        leases = lease.owner.leases
        if lease.id in leases:
            raise RemoteError(f"the lease {lease.id!r} is open")
        leases[lease.id] = lease
        try:
            with self.leases.working(lease):
                await self.leases.take(lease, wait)
                yield
        except BaseException:
            if lease.ending is None:  # else what ends it waits for this very task
                with contextlib.suppress(Exception):
                    await self.release(lease)
            raise

    async def release(self, lease: L) -> None:
        """Stop the work on a lease, clear its place and free that in any case, also if the caller is cancelled."""
        if lease.ending is None:
            lease.ending = asyncio.create_task(self._end(lease))
        await asyncio.shield(lease.ending)

    async def _end(self, lease: L) -> None:
        lease.owner.leases.pop(lease.id, None)
        if work := tuple(lease.work):
            for task in work:
                task.cancel()
            await asyncio.wait(work, timeout=lease.patience)
        if not self.leases.drop(lease):
            return
        try:
            await self.clear(lease)
        except SystemExit as error:  # which would end the server
            raise RuntimeError(f"SystemExit: {error}") from error
        finally:
            self.leases.free()

    async def _take(self, owner: Owner[L], socket: ServerConnection, data: str | bytes) -> None:
        """Begin to answer a request."""
        number, size = frames.call_of(data), len(data)
        if number is None:
            await socket.close(1007, "a frame begins with its op and its call")
            return
        if number in owner.calls or len(owner.calls) >= MAX_CALLS or owner.held_bytes > MAX_HELD:
            busy = RemoteError(f"call {number} is under way already, or the client waits for too many others")
            await socket.send(frames.dump(self.failure(number, busy)))
            return

        def done(_: asyncio.Task[None]) -> None:
            del owner.calls[number]
            owner.held_bytes -= size

        owner.held_bytes += size
        owner.calls[number] = answer = asyncio.create_task(self._answer(owner, socket, number, data))
        answer.add_done_callback(done)

    async def _answer(self, owner: Owner[L], socket: ServerConnection, number: int, data: str | bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            sent = frames.dump(await self.reply(owner, data))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            sent = frames.dump(self.failure(number, error))
        if not socket.transport.is_closing():  # which is known before the connection counts as closed
            with contextlib.suppress(ConnectionClosed):
                await socket.send(sent)


def problem(error: BaseException) -> Problem:
    """Return an exception as it is sent."""
    if isinstance(error, asyncio.CancelledError):
        error = RemoteError("the lease was closed")
    trace = "".join(traceback.format_exception(error))
    texts = (type(error).__name__, str(error)[:10_000], trace[-20_000:])
    name, message, trace = (text.encode(errors="backslashreplace").decode() for text in texts)
    return Problem(type=name, message=message, traceback=trace, kind=kind_of(error), loss=loss_told_by(error))
