"""The server of sandboxes: the suites of every backend, who may come, and with what."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from websockets.asyncio.server import serve

import agent_rl as ar
from agent_rl.core.sandbox_loss import Cause
from agent_rl.sandboxes.calls import ExecResult
from agent_rl.sandboxes.remote import RemoteSandboxes, packing, wire
from agent_rl.serving.frames import TOKEN
from agent_rl.serving.host import ServerSettings
from agent_rl.testing import FakeSandboxes
from tests.adapters.sandbox_servers import PATIENCE, ROOT, health, in_thread, serve_command, served, wait_for
from tests.sandbox.backends import REMOTE_ADDRESS, SUITES


@pytest.mark.parametrize("suite", SUITES)
def test_remote_passes_the_suites_of_every_backend(suite: str) -> None:
    with serve_command() as (_, url):
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "sandbox", suite, "-k", "remote", "--tb=short"]
        environment = {**os.environ, REMOTE_ADDRESS: url}
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        print(ran.stdout)
        assert ran.returncode == 0 and int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 5
        wait_for(lambda: health(url)["taken"] == 0, "all places")


# Who may come, and with what


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert]
    try:
        subprocess.run([*words.split(), *names], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate")
    return cert, key


def test_token_and_tls_are_asked_for(certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate

    async def use(url: str, **options: str) -> None:
        sandboxes = RemoteSandboxes(url, **options)
        await (await sandboxes.open()).close()

    with served(token="secret", tls_cert=cert, tls_key=key) as url:
        assert url.startswith("https://")
        with pytest.raises(ar.ConfigError, match="nobody here vouches for"):
            asyncio.run(use(url))
        with pytest.raises(ar.ConfigError, match=f"401: set {TOKEN}"):
            asyncio.run(use(url, ca=cert, token="secre"))
        asyncio.run(use(url, ca=cert, token="secret"))
        monkeypatch.setenv(TOKEN, "secret")
        asyncio.run(use(url, ca=cert))
        with pytest.raises(ar.SandboxError, match=r"no server answers .* starts one, at https:// with TLS"):
            asyncio.run(use(url.replace("https", "http")))
        context = ssl.create_default_context(cafile=cert)
        with urllib.request.urlopen(f"{url}/health", context=context, timeout=PATIENCE) as answer:
            assert "secret" not in answer.read().decode()


def test_proxy_without_its_server_is_infrastructure() -> None:
    @asynccontextmanager
    async def proxy() -> AsyncGenerator[str, None]:
        async with serve(print, "127.0.0.1", 0, process_request=lambda at, _: at.respond(502, "Bad Gateway")) as there:
            yield f"http://127.0.0.1:{there.sockets[0].getsockname()[1]}"

    async def main(gone: str, url: str) -> None:
        with pytest.raises(ar.SandboxError, match="status 502: Bad Gateway") as raised:
            await RemoteSandboxes(gone).open()
        assert raised.value.loss.cause is Cause.NOT_OPENED
        pool = RemoteSandboxes([gone, url])
        for _ in range(2):
            await (await pool.open()).close()

    with in_thread(proxy()) as gone, served() as url:
        asyncio.run(main(gone, url))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token": ""}, TOKEN),
        ({"token": "secret"}, "--tls-cert"),
        ({"token": "secret", "tls_key": "/nowhere"}, "--tls-cert"),
    ],
)
def test_other_hosts_need_token_and_tls(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ar.ConfigError, match=message):
        ServerSettings(host="0.0.0.0", plain=False, **settings)
    assert ServerSettings(host="0.0.0.0", token="secret", plain=True).tls_cert == ""


def test_frames_of_strangers_are_refused() -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    head = '{"op":"restore","call":7,"lease":"x","snapshot":'
    calls = '"calls":[{"method":"close","arguments":{}}]'
    hostile = f'{{"files":"",{calls},"has_variables":true,"gap":null,"has_processes":false}}}}'
    with served() as url:
        with connect(url.replace("http", "ws") + wire.PATH) as client:
            for frame in (head + hostile, head + "[" * 100_000, head + '{"files":"%"}}', head):
                client.send(frame)
                reply = wire.load_reply(client.recv(timeout=PATIENCE))
                assert reply.call == 7 and reply.error is not None and reply.error.type == "RemoteError"
            client.send("x" * (32 * 2**20 + 1))
            with pytest.raises(ConnectionClosed, match="1009"):
                client.recv(timeout=PATIENCE)
        assert health(url)["taken"] == 0


def test_rollout_command_uses_remote_sandboxes(tmp_path: Path) -> None:
    with serve_command("--backend", "local", "warm=1", **{TOKEN: "secret"}) as (server, url):
        words = ["rollout", "env=python-v0", "policy=oracle", "n=2", "env_args.sandbox=remote"]
        ran = subprocess.run(
            [sys.executable, "-m", "agent_rl", *words, f"env_args.sandbox_args.url={url}"],
            cwd=tmp_path,
            env={**os.environ, TOKEN: "secret", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0 and "success 100.0%" in ran.stdout, ran.stdout + ran.stderr
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0


def test_output_beyond_a_frame_loses_its_middle() -> None:
    async def main(url: str) -> None:
        sandbox = await RemoteSandboxes(url).open()
        result = await sandbox.exec(["anything"], max_output=16 << 20)
        assert result.truncated and not result.sandbox_lost
        assert len(result.stdout) == packing.MAX_TEXT and result.stdout[0] == "\x01" and result.stdout[-1] == "\x02"
        with pytest.raises(ar.ConfigError, match="at most"):
            await sandbox.run_python("\x01" * ((16 << 20) + 1))
        await sandbox.close()

    with served(FakeSandboxes(lambda argv: ExecResult(0, "\x01" * (11 << 20) + "\x02", ""))) as url:
        asyncio.run(main(url))
