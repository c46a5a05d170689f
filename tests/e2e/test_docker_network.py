"""Docker sandboxes that may reach named hosts, on a real engine: the way there, and the ways around it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from agent_rl.sandboxes.base import Limits, Sandbox
from agent_rl.sandboxes.docker import DockerSandboxes, Engine
from agent_rl.sandboxes.docker.container import PROCESS
from tests.e2e.dockerd import is_empty
from tests.web_server import reply, serving

pytestmark = pytest.mark.e2e

SMALL = Limits(memory=128 * 2**20, processes=16, disk=8 * 2**20, files=256)


def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    reply(
        handler,
        b"x" * 300_000 if handler.path == "/large" else f"{handler.command} {body.decode()}".encode(),
        "text/plain",
    )


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server on this machine."""
    with serving(answer) as url:
        yield int(url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def opened(engine: Engine, **options: object) -> AsyncIterator[Sandbox]:
    sandboxes = DockerSandboxes(host=engine.host, limits=SMALL, **options)  # type: ignore[arg-type]
    try:
        yield await sandboxes.open(owner="test")
    finally:
        await sandboxes.close()


ASK = """
import http.client, socket
def ask(host, port, path="/", body=None):
    try:
        there = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
        there.set_tunnel(host, port)
        there.request("POST" if body else "GET", path, body)
        return there.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
def reach(host, port, family=socket.AF_INET):
    try:
        socket.create_connection((host, port), timeout=5).close()
        return "reached"
    except OSError as error:
        return type(error).__name__
"""


async def value(sandbox: Sandbox, code: str) -> str:
    result = await sandbox.run_python(code)
    assert result.error is None, result
    return str(result.value)


def test_docker_network_reaches_named_hosts_only(
    engine: Engine, port: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def main() -> None:
        options = {"network": [f"localhost:{port}", "metadata.test"], "network_private": True, "require": ["network"]}
        async with opened(engine, **options) as sandbox:
            await value(sandbox, ASK)
            assert await value(sandbox, f"ask('localhost', {port}, '/', 'hello')") == "'POST hello'"
            await value(sandbox, "import os; os.environ.update(no_proxy='', NO_PROXY='')")
            plain = f"import urllib.request as u\nu.urlopen('http://localhost:{port}/').read()"
            assert await value(sandbox, plain) == "b'GET '"
            for host in (
                "example.org",
                "127.0.0.1",
                "::1",
                "2130706433",
                "169.254.169.254",
                "metadata.google.internal",
            ):
                assert "403" in await value(sandbox, f"ask({host!r}, {port})"), host
            for other in (1, 22, 2375, port + 1):
                assert "403" in await value(sandbox, f"ask('localhost', {other})"), other
            for host in ("127.0.0.1", "172.17.0.1", "169.254.169.254", "8.8.8.8"):
                assert await value(sandbox, f"reach({host!r}, {port})") != "'reached'", host
            assert "gaierror" in await value(sandbox, "reach('example.org', 443)")
            mounts = (await sandbox.exec(["sh", "-c", "cat /proc/mounts; ls -A /"])).stdout
            assert "proxy" not in mounts, "the socket of the host is the keeper's alone"

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    refused = [record.message for record in caplog.records if "was refused" in record.message]
    assert any("'169.254.169.254:" in line for line in refused) and any("'localhost:22'" in line for line in refused)


def test_docker_network_refuses_names_that_lead_home(engine: Engine, port: int) -> None:
    async def main() -> None:
        async with opened(engine, network=[f"localhost:{port}"]) as sandbox:
            await value(sandbox, ASK)
            assert "403" in await value(sandbox, f"ask('localhost', {port})")

    asyncio.run(main())


def test_docker_network_bounds_bytes_and_connections(engine: Engine, port: int) -> None:
    flood = f"""
import socket
held = [socket.create_connection(("127.0.0.1", 3128), timeout=5) for _ in range(60)]
try:
    held[-1].sendall(b"CONNECT localhost:{port} HTTP/1.1\\r\\n\\r\\n")
    held[-1].settimeout(1)
    said = held[-1].recv(10)
except OSError as error:
    said = type(error).__name__
for each in held:
    each.close()
said
"""

    async def main() -> None:
        options = {"network": [f"localhost:{port}"], "network_private": True, "network_mb": 0.5}
        async with opened(engine, **options) as sandbox:
            await value(sandbox, ASK)
            assert await value(sandbox, flood) == "'TimeoutError'", "the 60th has to wait"
            said = [await value(sandbox, f"len(ask('localhost', {port}, '/large'))") for _ in range(3)]
            assert said[0] == "300000" and "300000" not in said[1:]
            assert "403" in await value(sandbox, f"ask('localhost', {port})")

    asyncio.run(main())


TRAINER = """
import asyncio, sys
from agent_rl.sandboxes.docker import DockerSandboxes
async def main():
    sandboxes = DockerSandboxes(host=sys.argv[1], network=["localhost"])
    sandbox = await sandboxes.open()
    print(sandboxes._pods._proxy.socket, flush=True)
    await sandbox.exec(["sleep", "60"], timeout=100)
asyncio.run(main())
"""


def test_docker_network_ends_with_its_trainer(engine: Engine) -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINER, engine.host], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        socket = Path(trainer.stdout.readline().strip())
        assert socket.is_socket() and len(engine.labelled(PROCESS)) == 2
        trainer.send_signal(signal.SIGKILL)
    assert is_empty(engine)
    until = time.monotonic() + 15
    while socket.parent.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not socket.parent.exists()
