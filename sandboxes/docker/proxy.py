"""A proxy that lets sandboxes reach named hosts and no others: a process of its own, beside the trainer.

It listens on a Unix socket in a folder that it makes, speaks HTTP/1.1 (`CONNECT`, and requests for `http://` URLs), and
ends when its stdin does. A name counts only if it is on the list, with its port; addresses never are, however they are
spelled. What a name resolves to is checked, all of it, and the connection is made to the very address that was checked:
a name that resolves to another one later (DNS rebinding) gains nothing. Links' own addresses, where clouds keep their
metadata, are refused always, other private ones unless the list was given as private.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from agent_rl.core.addresses import is_public

SOCKET = "proxy.sock"
MAX_HEAD = 16 * 1024
"""Bytes of a request's head."""
MAX_CONNECTIONS = 2048
"""At a time, of all sandboxes of a backend; more have to wait."""
HEAD_TIMEOUT = 20.0
"""Seconds for a request's head, for looking up a name, and for connecting, each."""
IDLE = 300.0
"""Seconds after which a connection in which nothing moves is closed."""
MAX_NOTES = 100
"""Different refusals that are reported: model code chooses the names, and may not fill the trainer's log."""
_PIECE = 64 * 1024

Address = tuple[str, int]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class RefusedError(Exception):
    """A request that is not let through."""


async def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in found]


class Proxy:
    """Serves connections by a list.

    Args:
        allowed: the hosts, in lower case, each with its ports.
        allow_private: whether they may have addresses of private networks or of this machine.
        note: told of what is refused, by the target and the reason; of each pair once.
        resolve: looks up names.
    """

    def __init__(
        self,
        allowed: Mapping[str, Sequence[int]],
        *,
        allow_private: bool,
        note: Callable[[str, str], None],
        resolve: Resolve = look_up,
    ) -> None:
        self._allowed, self._allow_private, self._resolve = allowed, allow_private, resolve
        self._note, self._noted = note, set[tuple[str, str]]()
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        async with self._places:
            try:
                await self._serve(reader, writer)
            except RefusedError as refused:
                writer.write(_answer("403 Forbidden", f"agent-rl: {refused}\n"))
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:  # TimeoutError is one
                writer.write(_answer("502 Bad Gateway", f"agent-rl: {type(error).__name__}\n"))
            finally:
                await _close(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_TIMEOUT):
            head = await reader.readuntil(b"\r\n\r\n")
        method, target, lines = _parse(head)
        is_tunnel = method == "CONNECT"
        place, path = _place(target, is_tunnel)
        # one request a connection: a second one would name a host of its own
        size, sent = (None, b"") if is_tunnel else _request(method, path, place, lines)
        there, back = await _connect(await self._check(*place), place[1])
        try:
            if is_tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back.write(sent)
            await _both(_copy(reader, back, size), _copy(there, writer, None))
        finally:
            await _close(back)

    async def _check(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host.

        Raises:
            RefusedError: if it is not to be reached.
        """
        target = f"{host}:{port}"
        if port not in self._allowed.get(host, ()):
            self._refuse(target, "is not among the hosts that this sandbox may reach")
        try:
            async with asyncio.timeout(HEAD_TIMEOUT):
                addresses = await self._resolve(host, port)
        except OSError as error:
            raise RefusedError(f"{target} has no address: {type(error).__name__}") from None
        for address in addresses:
            if not (is_public(address) or (self._allow_private and _is_ordinary(address))):
                self._refuse(target, f"has the address {address}, which is not public")
        return addresses

    def _refuse(self, target: str, reason: str) -> NoReturn:
        noted = ascii(target[:200]), reason
        if noted not in self._noted and len(self._noted) < MAX_NOTES:
            self._noted.add(noted)
            self._note(*noted)
        raise RefusedError(f"{noted[0]} {reason}")


def _parse(head: bytes) -> tuple[str, str, list[str]]:
    """Return a request's method, target and further lines."""
    try:
        first, *lines = head.decode("ascii").rstrip("\r\n").split("\r\n")
        method, target, version = first.split(" ")
    except ValueError:
        raise RefusedError("this is no request") from None
    if not version.startswith("HTTP/1.") or any("\n" in line or "\r" in line or "\0" in line for line in lines):
        raise RefusedError("this is no request")
    return method, target, lines


def _place(target: str, is_tunnel: bool) -> tuple[Address, str]:
    """Return the host and the port of a target, and the path there.

    Raises:
        RefusedError: if it names none.
    """
    try:
        parts = urlsplit(f"//{target}" if is_tunnel else target)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if not host or "@" in parts.netloc or (port is None if is_tunnel else parts.scheme != "http"):
        raise RefusedError(f"{target[:200]!a} is nothing to connect to")
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    return (host.removesuffix("."), 80 if port is None else port), path


def _request(method: str, path: str, place: Address, lines: Sequence[str]) -> tuple[int, bytes]:
    """Return the size of a request's body, and its head as the host gets it: with its own name, and no second request.

    Raises:
        RefusedError: if the size isn't given by one Content-Length.
    """
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    sizes = [value for name, value in headers if name == "content-length"]
    if any(name == "transfer-encoding" for name, _ in headers) or len(sizes) > 1 or not "".join(sizes or "0").isdigit():
        raise RefusedError("a request's body needs one Content-Length")
    own = ("host", "connection", "keep-alive", "upgrade", "te", "trailer")
    kept = [f"{name}: {value}" for name, value in headers if name not in own and not name.startswith("proxy-")]
    host = place[0] if place[1] == 80 else f"{place[0]}:{place[1]}"
    head = "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *kept))
    return int("".join(sizes) or "0"), f"{head}\r\n\r\n".encode("ascii")


def _is_ordinary(address: str) -> bool:
    """Whether an address that isn't public is of a private network or of this machine, and not of a link."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return (ip.is_private or ip.is_loopback) and not (ip.is_link_local or ip.is_unspecified or ip.is_multicast)


async def _connect(addresses: Sequence[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that answers.

    Raises:
        OSError: if none does.
    """
    error = OSError("there is no address")
    for address in addresses:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT):
                return await asyncio.open_connection(address, port, limit=MAX_HEAD)
        except OSError as failure:
            error = failure
    raise error


async def _both(there: Awaitable[None], back: Awaitable[None]) -> None:
    """Copy both ways, until the way back is over or one fails: a client that sends no more may still hear."""
    first, second = asyncio.ensure_future(there), asyncio.ensure_future(back)
    try:
        done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        if second not in done:
            first.result()
        await second
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int | None) -> None:
    """Copy so many bytes, or all until the end."""
    while size is None or size > 0:
        async with asyncio.timeout(IDLE):
            piece = await reader.read(_PIECE if size is None else min(size, _PIECE))
            if not piece:
                break
            writer.write(piece)
            await writer.drain()
        size = None if size is None else size - len(piece)
    if size is None and writer.can_write_eof():
        writer.write_eof()


async def _close(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        async with asyncio.timeout(HEAD_TIMEOUT):
            await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(HEAD_TIMEOUT):
            await writer.wait_closed()


def _answer(status: str, text: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


async def _run(folder: str) -> None:
    """Serve until stdin ends."""
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    settings = json.loads(await stdin.readline())
    say = functools.partial(print, flush=True)
    proxy = Proxy(**settings, note=lambda target, reason: say(f"{target} {reason}"))
    path = Path(folder, SOCKET)
    server = await asyncio.start_unix_server(proxy.serve, path, limit=MAX_HEAD)
    path.chmod(0o666)  # the folder is ours alone; a relay, which gets the socket alone, has a user of its own
    say(path)
    await stdin.read()
    server.close()


def main() -> None:
    """Serve until stdin ends; its first line is the settings, the first line of stdout the socket's path."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = tempfile.mkdtemp(prefix="agent-rl-proxy-")
    try:
        asyncio.run(_run(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
