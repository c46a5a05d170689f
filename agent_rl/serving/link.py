"""The client's side: this process's one connection to a server, shared by all that it leases there.

It lives on an event loop of its own: it answers pings while the trainer computes. A lost connection fails what was on
it, and the next use connects again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from agent_rl.concurrency import LoopThread
from agent_rl.errors import ConfigError, RemoteError
from agent_rl.serving.frames import MAX_BYTES, TOKEN, Cancel, Reply, Request, bound_sending, dump, require_websockets

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

PAUSES = (0.0, 0.3, 1.0)
"""Seconds before each try to connect."""
PING = 20.0
"""Seconds between pings of a server, and until one that was not answered ends the connection."""
R = TypeVar("R", bound=Reply)
_calls = itertools.count()


def next_call() -> int:
    """Return a number for a call, new in this process."""
    return next(_calls)


class Connection(Generic[R]):
    """This process's way to a server: connects when it is first used, and again after a loss."""

    def __init__(
        self, url: str, load: Callable[[str | bytes], R], started_by: str, *, token: str | None = None, ca: str = ""
    ) -> None:
        """Store the address.

        Args:
            url: of the server's WebSocket, with http:// or https://.
            load: reads a reply; raises RemoteError if it is none.
            started_by: the command that starts such a server.
            token: what the server wants to hear; $AGENT_RL_SERVER_TOKEN at the time of connecting if None.
            ca: a PEM file of the certificates that may vouch for the server's; those of the system if empty.

        Raises:
            ConfigError: if websockets is not installed, or `ca` can't be read.
        """
        require_websockets()
        self.url, self._load, self._started_by, self._token = url, load, started_by, token
        try:
            self._tls = ssl.create_default_context(cafile=ca or None) if url.startswith("https:") else None
        except OSError as error:  # an SSLError is one
            raise ConfigError(f"ca={ca!r} can't be used: {error}; give a PEM file of certificates") from None
        self.thread = LoopThread(f"agent_rl {url}")
        self._link: Link[R] | None = None
        self._connecting: asyncio.Lock | None = None

    async def link(self) -> Link[R]:
        """Return the connection, made if there is none.

        Raises:
            RemoteError: if no server answers.
            ConfigError: if it wants another token.
        """
        if (link := self._link) is not None and not link.lost:
            return link
        return await self.thread.run(self._connected())

    async def run(self, link: Link[R], request: Request, hear: Callable[[R], None] | None = None) -> R:
        """Return the reply to a request, which `hear` is told first; wait on the caller's event loop."""
        return await self.thread.run(link.ask(request, hear))

    def begin(self, link: Link[R], request: Request, hear: Callable[[R], None] | None = None) -> Future[R]:
        """Send a request; return what will hold the reply, which `hear` is told first, on the connection's loop."""
        return self.thread.begin(link.ask(request, hear))

    def wait(self, request: Request, link: Link[R] | None = None) -> R:
        """Return the reply to a request; block until it is there."""

        async def ask() -> R:
            return await (link or await self._connected()).ask(request)

        return self.thread.wait(ask())

    async def _connected(self) -> Link[R]:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._link is None or self._link.lost:
                self._link = await self._connect()
            return self._link

    async def _connect(self) -> Link[R]:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        failure: Exception | None = None
        token = os.environ.get(TOKEN, "") if self._token is None else self._token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for pause in PAUSES:
            await asyncio.sleep(pause)
            try:
                socket = await connect(
                    self.url.replace("http", "ws", 1),
                    ssl=self._tls,
                    additional_headers=headers,
                    compression=None,
                    max_size=MAX_BYTES,
                    ping_interval=PING,
                    ping_timeout=PING,
                    proxy=None,
                )
                bound_sending(socket, PING)
                return Link(self, socket, self._load)
            except InvalidStatus as error:
                status, said = error.response.status_code, (error.response.body or b"").decode(errors="replace").strip()
                if status < 500:
                    other = "" if status == 401 else f"; no `{self._started_by}` of this version listens there"
                    raise ConfigError(f"{self.url} answers {status}: {said[:200]}{other}") from None
                failure = RemoteError(f"status {status}: {said[:200]}")  # such as a proxy's whose server is gone
            except ssl.SSLCertVerificationError as error:
                why = f"{self.url} has a certificate that nobody here vouches for: {error.verify_message}"
                raise ConfigError(f"{why}; name its PEM file (ca, or SSL_CERT_FILE)") from None
            except (OSError, TimeoutError, WebSocketException, EOFError, ValueError) as error:  # the last: a redirect's
                failure = error
        why, hint = str(failure) or type(failure).__name__, ""
        if isinstance(failure, ConnectionResetError | ssl.SSLError | WebSocketException | EOFError):
            hint = f", at {'http:// without' if self._tls else 'https:// with'} TLS"
        raise RemoteError(f"no server answers at {self.url} ({why}): {self._started_by} starts one{hint}")


class Link(Generic[R]):
    """One WebSocket, and the calls that wait for their replies on it; all but the constructor's caller is its loop."""

    def __init__(self, connection: Connection[R], socket: ClientConnection, load: Callable[[str | bytes], R]) -> None:
        self.connection = connection
        self._has_ended = False
        self._why = ""
        self._socket, self._load = socket, load
        self._waiting: dict[int, asyncio.Future[R]] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def lost(self) -> bool:
        """Whether nothing can be asked on it any more, which is known before it has ended."""
        return self._has_ended or self._socket.transport.is_closing()

    async def ask(self, request: Request, hear: Callable[[R], None] | None = None) -> R:
        """Send a request and return the reply, which `hear` is told first, whatever it says.

        Raises:
            RemoteError: if the connection is lost, or the server says no. What went wrong there is raised here again.
        """
        from websockets.exceptions import ConnectionClosed

        data = dump(request)
        if self.lost:
            raise self._loss()
        waiting: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[request.call] = waiting
        try:
            await self._socket.send(data)
            found = await waiting
        except ConnectionClosed:
            raise self._loss() from None
        except asyncio.CancelledError:
            with suppress(ConnectionClosed):
                await self._socket.send(dump(Cancel(op="cancel", call=next_call(), of=request.call)))
            raise
        finally:
            self._waiting.pop(request.call, None)
        if hear is not None:
            hear(found)
        if found.error is not None:
            error = found.error.error()
            error.add_note(f"on {self.connection.url}:\n{found.error.traceback}")
            raise error
        return found

    async def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            async for data in self._socket:
                reply = self._load(data)
                if (waiting := self._waiting.get(reply.call)) is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ConnectionClosed, RemoteError) as error:
            self._why = str(error)
        finally:
            self._has_ended = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._loss())
                    waiting.exception()  # so that asyncio does not warn where its caller still sends
            self._socket.transport.abort()

    def _loss(self) -> RemoteError:
        return RemoteError(f"the server at {self.connection.url} was lost{f': {self._why}' if self._why else ''}")
