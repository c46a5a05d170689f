"""The proxy of sandboxes that may reach named hosts: what it lets through, and requests that mean to get further."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.docker import DockerSandboxes
from agent_rl.sandboxes.docker.network import Network, ProxyProcess, read_network
from agent_rl.sandboxes.docker.proxy import MAX_HEAD, MAX_NOTES, Proxy, RefusedError, _parse, _place, _request

Ask = Callable[[bytes], Awaitable[bytes]]


@contextlib.asynccontextmanager
async def proxied(
    folder: Path, addresses: Sequence[str], *, allow_private: bool = True, notes: list[str] | None = None
) -> AsyncIterator[tuple[Ask, int, list[bytes]]]:
    """Run a proxy to `in.test`, which has these addresses; yield how to ask, the host's port, what it heard."""
    heard: list[bytes] = []

    async def host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def resolve(name: str, port: int) -> Sequence[str]:
        assert name == "in.test"
        return addresses

    def note(target: str, reason: str) -> None:
        if notes is not None:
            notes.append(f"{target} {reason}")

    server = await asyncio.start_server(host, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = Proxy({"in.test": [port]}, allow_private=allow_private, note=note, resolve=resolve)
    listening = await asyncio.start_unix_server(proxy.serve, folder / "p", limit=MAX_HEAD)

    async def ask(data: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(folder / "p")
        writer.write(data.replace(b"PORT", str(port).encode()))
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(4096):
                answer += piece
        writer.close()
        return answer

    try:
        yield ask, port, heard
    finally:
        listening.close()
        server.close()


def test_proxy_tunnels_to_a_named_host(tmp_path: Path) -> None:
    async def main() -> None:
        async with proxied(tmp_path, ["127.0.0.1"]) as (ask, _, heard):
            answer = await ask(b"CONNECT in.test:PORT HTTP/1.1\r\n\r\nhello")
            assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\nok") and heard == [b"hello"]

    asyncio.run(main())


def test_proxy_sends_one_request_with_the_hosts_own_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with proxied(tmp_path, ["127.0.0.1"]) as (ask, port, heard):
            sent = b"POST http://IN.test:PORT/a?b=c HTTP/1.1\r\nHost: evil.test\r\nContent-Length: 2\r\nX: y\r\n\r\nhi"
            answer = await ask(sent + b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
            assert answer.endswith(b"ok")
            lines = heard[0].decode().split("\r\n")
            assert lines[:3] == ["POST /a?b=c HTTP/1.1", f"Host: in.test:{port}", "Connection: close"]
            assert b"evil" not in b"".join(heard) and heard[0].endswith(b"\r\n\r\nhi")

    asyncio.run(main())


ELSEWHERE = [
    *(b"CONNECT %s HTTP/1.1\r\n\r\n" % target for target in (b"evil.test:443", b"in.test:1", b"in.test", b"in.test:x")),
    *(
        b"CONNECT %s:PORT HTTP/1.1\r\n\r\n" % at
        for at in (b"127.0.0.1", b"[::1]", b"2130706433", b"0x7f.1", b"localhost")
    ),
    *(
        b"CONNECT %s:80 HTTP/1.1\r\n\r\n" % at
        for at in (b"169.254.169.254", b"[fd00:ec2::254]", b"metadata.google.internal")
    ),
    b"CONNECT in.test@evil.test:PORT HTTP/1.1\r\n\r\n",
    b"CONNECT evil.test:443 HTTP/1.1\r\nHost: in.test:PORT\r\n\r\n",
    b"GET http://evil.test/ HTTP/1.1\r\nHost: in.test:PORT\r\n\r\n",
    b"GET http://in.test:PORT@evil.test/ HTTP/1.1\r\n\r\n",
    b"GET https://in.test:PORT/ HTTP/1.1\r\n\r\n",
    b"GET file:///etc/passwd HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: in.test:PORT\r\n\r\n",
    b"POST http://in.test:PORT/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST http://in.test:PORT/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\n",
    b"POST http://in.test:PORT/ HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"GET http://in.test:PORT/ HTTP/1.1\r\nX: a\nHost: evil.test\r\n\r\n",
    b"GET http://in.test:PORT/ HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEAD + b"\r\n\r\n",
    b"GET  http://in.test:PORT/ HTTP/1.1\r\n\r\n",
    b"\xff\xfe\r\n\r\n",
]


def test_proxy_refuses_what_is_not_on_the_list(tmp_path: Path) -> None:
    async def main() -> None:
        async with proxied(tmp_path, ["127.0.0.1"]) as (ask, _, heard):
            for data in ELSEWHERE:
                assert (await ask(data)).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 502 ")), data
            assert heard == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"], ["8.8.8.8", "127.0.0.1"]],
)
def test_proxy_refuses_names_that_resolve_to_private_addresses(tmp_path: Path, addresses: list[str]) -> None:
    async def main() -> None:
        async with proxied(tmp_path, addresses, allow_private=False, notes=(notes := [])) as (ask, port, heard):
            assert b"403" in await ask(b"CONNECT in.test:PORT HTTP/1.1\r\n\r\n")
            assert heard == []
            assert notes == [f"'in.test:{port}' has the address {addresses[-1]}, which is not public"]

    asyncio.run(main())


@pytest.mark.parametrize("address", ["169.254.169.254", "::ffff:169.254.169.254", "fe80::1%lo", "0.0.0.0", "224.0.0.1"])
def test_proxy_never_connects_to_the_addresses_of_a_link(tmp_path: Path, address: str) -> None:
    async def main() -> None:
        async with proxied(tmp_path, [address]) as (ask, _, heard):
            assert b"not public" in await ask(b"CONNECT in.test:PORT HTTP/1.1\r\n\r\n")
            assert heard == []

    asyncio.run(main())


def test_proxy_reports_each_refusal_once_and_few(tmp_path: Path) -> None:
    async def main() -> None:
        async with proxied(tmp_path, [], notes=(notes := [])) as (ask, _, _heard):
            for i in (*range(MAX_NOTES), *range(MAX_NOTES + 20)):
                await ask(b"CONNECT h%d.test:1 HTTP/1.1\r\n\r\n" % i)
            assert len(notes) == len(set(notes)) == MAX_NOTES

    asyncio.run(main())


Heads = st.binary(max_size=60) | st.text("GET CONEChtps:/[]@.%0:\\\t\x0b\u00a0", max_size=40).map(str.encode)


@settings(max_examples=50)
@given(Heads, st.booleans())
def test_proxy_refuses_whatever_is_no_request(head: bytes, is_tunnel: bool) -> None:
    with contextlib.suppress(RefusedError):
        method, target, lines = _parse(head + b"\r\n\r\n")
        place, path = _place(target, is_tunnel)
        assert place[0] and " " not in path
        size, sent = _request(method, path, place, lines)
        assert size >= 0 and sent.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize(
    "hosts",
    [["127.0.0.1"], ["[::1]"], ["2130706433"], ["0x7f.0.0.1"], ["a b"], ["h:0"], ["h:70000"], ["*.org"], [""], "h"],
)
def test_network_takes_names_only(hosts: object) -> None:
    with pytest.raises(ConfigError, match="network"):
        DockerSandboxes(network=hosts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": "tcp://far:2375"}, "unix://"),
        ({"runtime": "runsc"}, "runtime='runsc'"),
        ({"network_mb": 0}, "network_mb=0"),
    ],
)
def test_network_is_refused_where_it_can_not_be_had(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DockerSandboxes(network=["pypi.org"], **options)  # type: ignore[arg-type]


def test_network_hosts_have_the_ports_of_the_web() -> None:
    network = read_network(["PyPI.org", "mirror.test:8080", "mirror.test:81"], False, 1)
    assert network is not None and network.allowed == {"pypi.org": [80, 443], "mirror.test": [8080, 81]}


def test_proxy_process_ends_with_its_folder() -> None:
    process = ProxyProcess(Network(("pypi.org",)))
    assert process.runs() and Path(process.socket).is_socket()
    assert Path(process.socket).parent.stat().st_mode & 0o777 == 0o700
    process.stop()
    assert not process.runs() and not Path(process.socket).parent.exists()
