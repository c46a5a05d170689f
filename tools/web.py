"""HTTP for tools: a request with limits on time and size, by the standard library. It blocks: call it in a thread."""

from __future__ import annotations

import email.message
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from agent_rl.core.addresses import is_public

PORTS = {"http": 80, "https": 443}
_AS_IS = "/%:@!$&'()*+,;=~-._?"
"""What a path or a query may hold without being quoted."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered."""

    status: int
    headers: email.message.Message
    body: bytes
    is_cut: bool
    """Whether the body was longer than `max_bytes`."""


class AddressError(ValueError):
    """A URL that may not be asked for."""


def request(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    seconds: float = 20.0,
    max_bytes: int = 10_000_000,
    allow_private: bool = True,
) -> Response:
    """Send a request and return the answer, whatever its status; redirects are not followed, proxies not used.

    Args:
        url: http or https.
        method: of the request.
        body: of the request.
        headers: of the request.
        seconds: for all of it, however slowly the server sends; looking up the host's name can take longer.
        max_bytes: of the body; the rest is not read.
        allow_private: whether the host may have an address of this machine or of a private network.

    Raises:
        AddressError: if the URL is none, or its host has a private address.
        OSError: if the server can't be reached, breaks off, or answers in no HTTP.
        TimeoutError: if it takes too long.
    """
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise AddressError(f"'{url}' is no http or https URL")
    port = parts.port or PORTS[parts.scheme]
    until = time.monotonic() + seconds
    sock = _connect(parts.hostname, port, until, allow_private)
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # a read that waits returns

    timer = threading.Timer(max(until - time.monotonic(), 0), end)
    timer.daemon = True
    timer.start()
    try:
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
        connection = http.client.HTTPConnection(parts.hostname, port)
        connection.sock = sock
        target = quote(parts.path or "/", safe=_AS_IS) + (f"?{quote(parts.query, safe=_AS_IS)}" if parts.query else "")
        host = parts.netloc.rpartition("@")[2]
        connection.request(method, target, body, {"Host": host, "Accept-Encoding": "identity", **(headers or {})})
        with connection.getresponse() as answer:  # which holds the socket
            read, is_cut = _read(answer, max_bytes)
            if late.is_set():
                raise TimeoutError
            if answer.length and not is_cut:
                raise ConnectionError(f"{host} broke off {answer.length} bytes before the end")
            return Response(answer.status, answer.headers, read, is_cut)
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):  # the socket's own clock may be the first
            raise TimeoutError(f"{parts.hostname} took more than {seconds:g} s") from None
        if isinstance(error, http.client.HTTPException):
            raise ConnectionError(f"{parts.hostname} answered in no HTTP: {type(error).__name__} {error}") from None
        raise
    finally:
        timer.cancel()
        sock.close()


def _connect(host: str, port: int, until: float, allow_private: bool) -> socket.socket:
    """Connect to an address that was looked at, so that a second look-up can't give another."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [(family, place) for family, _, _, _, place in found if allow_private or is_public(str(place[0]))]
    if not addresses:
        raise AddressError(f"{host} has a private address, which may not be reached")
    for family, place in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(until - time.monotonic(), 0.001))
            sock.connect(place)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def _read(answer: http.client.HTTPResponse, most: int) -> tuple[bytes, bool]:
    pieces, size = [], 0
    while piece := answer.read(65536):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            return b"".join(pieces)[:most], True
    return b"".join(pieces), False
