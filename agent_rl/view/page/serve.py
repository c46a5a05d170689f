"""The page, served: a run that is followed while it is written; read only, for one person.

    /                    the page
    /api/run             what run.json of a file has
    /api/heads?from=N    columns of the heads from the Nth on
    /api/metrics         rows
    /api/episode/ID      one episode
    /api/select?where=EXPRESSION&search=TEXT    the ids that fit, of all that was said
    /api/changes         server-sent events: how many heads there are, and how often metrics changed

A page that another site shows can't ask: it has another origin. Under a name that is made to mean this machine, its
requests name that host, and are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs, unquote, urlsplit

from agent_rl.core.messages import JSON
from agent_rl.errors import AgentRLError, ConfigError
from agent_rl.serving.frames import LOCAL, TOKEN
from agent_rl.store.selection import select
from agent_rl.store.token_records import token_records
from agent_rl.view.page.build import page_parts
from agent_rl.view.page.data import dump, episode_json, head_columns, run_json
from agent_rl.view.page.follow import Followed

_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
)
_ALIVE = 15.0
"""Seconds between comments on a stream of events, by which a connection that is gone is found."""


@dataclass(frozen=True, slots=True)
class PageSettings:
    """The address of a page, and the secret of its readers."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 for any that is free."""
    token: str = ""
    """What browsers have to know."""

    def __post_init__(self) -> None:
        if self.host not in LOCAL and not self.token:
            raise ConfigError(
                f"--host {self.host} lets other machines in: set {TOKEN} to a secret of your own, "
                f"and open the page with ?token=SECRET at its end"
            )


@contextlib.contextmanager
def serving_page(path: Path, settings: PageSettings) -> Generator[str, None, None]:
    """Serve a run as long as the context lasts; yield the page's address.

    Args:
        path: the run's folder, or an episode file.
        settings: where, and to whom.

    Raises:
        ConfigError: if the address can't be used.
    """
    followed = Followed(path)
    try:
        server = _Server((settings.host, settings.port), partial(_Handler, followed, settings))
    except OSError as error:
        raise ConfigError(f"{settings.host}:{settings.port} can't be served on: {error}; choose a --port") from error
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    threads = [
        threading.Thread(target=followed.follow, name="agent_rl follow", daemon=True),
        threading.Thread(target=server.serve_forever, args=(0.1,), name="agent_rl page", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield f"http://{host}:{server.server_port}/"
    finally:
        followed.close()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            import socket

            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking for this machine's name, which may take seconds."""
        import socketserver

        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: _Server

    def __init__(self, followed: Followed, settings: PageSettings, *connection: object, **known: object) -> None:
        self.followed, self.settings = followed, settings
        super().__init__(*connection, **known)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is the user's."""

    def handle(self) -> None:
        """Answer until the browser leaves, which it may do at any moment."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def do_GET(self) -> None:
        """Answer."""
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if not self._is_known_host():
            self._send(HTTPStatus.FORBIDDEN, b"this page has another name", "text/plain")
        elif self.settings.token and not self._is_known(query):
            text = f"open this page with ?token=SECRET at its end: what {TOKEN} is where it is served\n"
            self._send(HTTPStatus.UNAUTHORIZED, text.encode(), "text/plain")
        elif self.settings.token and "token" in query:
            self._remember()
        else:
            self._answer(url.path, query)

    def _is_known_host(self) -> bool:
        """Return whether a request names this host; with a token, any name is fine."""
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return bool(self.settings.token) or name in (*LOCAL, self.settings.host)

    def _is_known(self, query: Mapping[str, str]) -> bool:
        wanted = _digest(self.settings.token)
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = (_digest(query.get("token", "")), _digest(bearer), cookie.value if cookie else "")
        return any(hmac.compare_digest(one.encode(), wanted.encode()) for one in given)

    @property
    def _cookie(self) -> str:
        return f"agent_rl_{self.server.server_port}"  # browsers share cookies between ports

    def _remember(self) -> None:
        """Store in a cookie that the token is known, and take it out of the address."""
        cookie = f"{self._cookie}={_digest(self.settings.token)}; HttpOnly; SameSite=Lax; Path=/"
        self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": cookie})

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        if path == "/":
            page = "".join(page_parts("served")).encode()
            self._send(HTTPStatus.OK, page, "text/html; charset=utf-8")
        elif path == "/api/changes":
            self._stream()
        elif path.startswith("/api/"):
            try:
                found = self._value(path.removeprefix("/api/"), query)
            except (AgentRLError, ValueError) as error:
                self._send(HTTPStatus.BAD_REQUEST, str(error).encode(errors="replace"), "text/plain; charset=utf-8")
                return
            if found is None:
                self._send(HTTPStatus.NOT_FOUND, b"there is no such thing", "text/plain")
            else:
                self._send(HTTPStatus.OK, dump(found), "application/json")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"the page is at /", "text/plain")

    def _value(self, name: str, query: Mapping[str, str]) -> JSON:
        """Return what the page asks for, or None if there is no such thing."""
        followed = self.followed
        if name == "run":
            count = len(followed.rows)
            return {**run_json(followed.path, shown=count, total=count)}
        if name == "heads":
            first = max(0, int(query.get("from", "0")))
            return head_columns(followed.rows[first:])
        if name == "metrics":
            return [*followed.metrics]
        if name == "select":
            where = [query["where"]] if query.get("where") else []
            chosen = select(followed.path, where=where, search=query.get("search", ""), limit=len(followed.rows))
            return [*chosen.ids]
        if name.startswith("episode/"):
            episode = followed.episode(unquote(name.removeprefix("episode/")))
            if episode is not None:
                return episode_json(episode, token_records(followed.path, episode.id), followed.decode())
        return None

    def _stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        for header, value in {**_HEADERS, "Content-Type": "text/event-stream", "Connection": "close"}.items():
            self.send_header(header, value)
        self.end_headers()
        self.close_connection = True
        known: dict[str, JSON] | None = None
        self.wfile.write(b"retry: 1000\n\n")
        while not self.followed.is_closed:
            counts = self.followed.wait(known, _ALIVE)
            self.wfile.write(b":\n\n" if counts == known else b"data: " + json.dumps(counts).encode() + b"\n\n")
            known = counts

    def _send(self, status: HTTPStatus, body: bytes, kind: str, headers: Mapping[str, str] = _HEADERS) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **headers, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815


def _digest(token: str) -> str:
    return hashlib.sha256(f"agent_rl page {token}".encode(errors="replace")).hexdigest()
