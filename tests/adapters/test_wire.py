"""What none would say, between a server of sandboxes and its clients: drawn at random, and such as was found so."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

import agent_rl as ar
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.remote.client import remote_spec
from agent_rl.sandboxes.remote import RemoteSandboxes, wire
from agent_rl.sandboxes.remote.sandbox import RemoteSandbox
from agent_rl.sandboxes.remote.server import SandboxServer
from agent_rl.testing import FakeSandbox, FakeSandboxes
from tests.adapters.sandbox_servers import in_thread, served
from tests.adapters.wire_frames import REQUESTS
from tests.sandbox.test_fuzz import findings


def test_fuzz_finds_nothing_on_the_wire() -> None:
    assert asyncio.run(findings("wire")) == []


@pytest.mark.parametrize(
    ("trusting", "method", "fault", "found"),
    [
        (SandboxServer, "_find", lambda server, owner, name: owner.leases[name], "KeyError"),
        (SandboxServer, "clear", lambda server, lease: asyncio.sleep(0), "a sandbox is open"),
        (RemoteSandbox, "part", lambda box, found: found, "TypeError"),
    ],
)
def test_fuzz_finds_servers_and_clients_that_trust(
    trusting: type, method: str, fault: Callable[..., object], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusting, method, fault)
    assert any(found in finding for finding in asyncio.run(findings("wire")))


Answer = Callable[[ServerConnection, dict[str, object]], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncGenerator[str, None]:
    """Serve what does something with each request."""

    async def connected(socket: ServerConnection) -> None:
        async for data in socket:
            await answer(socket, json.loads(data))

    async with serve(connected, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def answer_nothing(socket: ServerConnection, asked: dict[str, object]) -> None:
    await socket.send(json.dumps({"call": asked["call"]}))


@pytest.mark.parametrize(
    "ask",
    [
        lambda box: box.exec(["true"]),
        lambda box: box.run_python("1"),
        lambda box: box.read_file("a"),
        lambda box: box.snapshot(),
        lambda box: box.start(["cat"]),
        lambda box: box.stream(80),
    ],
)
def test_answers_without_what_was_asked_for_are_losses(ask: Callable[[RemoteSandbox], Awaitable[object]]) -> None:
    async def main(url: str) -> None:
        box = await RemoteSandboxes(url).open()
        with pytest.raises(ar.SandboxError, match="without what was asked for") as raised:
            await ask(box)
        assert box.loss is not None and box.loss.cause is Cause.BACKEND_GONE and raised.value.loss == box.loss

    with in_thread(answering(answer_nothing)) as url:
        asyncio.run(main(url))


def test_environment_without_its_description_is_infrastructure() -> None:
    with in_thread(answering(answer_nothing)) as url, pytest.raises(ar.RemoteError, match="without what was asked"):
        remote_spec(f"{url}/calculator-v0")


@pytest.mark.parametrize("place", ["http://127.0.0.1:1/", "x://[", "ws://127.0.0.1:99999/"])
def test_redirects_to_nowhere_are_infrastructure(place: str) -> None:
    def redirect(connection: ServerConnection, request: Request) -> Response:
        response = connection.respond(302, "")
        response.headers["Location"] = place
        return response

    @asynccontextmanager
    async def redirecting() -> AsyncGenerator[str, None]:
        async with serve(print, "127.0.0.1", 0, process_request=redirect) as there:
            yield f"http://127.0.0.1:{there.sockets[0].getsockname()[1]}"

    with in_thread(redirecting()) as url, pytest.raises(ar.SandboxError, match="no server answers") as raised:
        asyncio.run(RemoteSandboxes(url).open())
    assert isinstance(raised.value.loss, SandboxLoss) and raised.value.loss.cause is Cause.NOT_OPENED


def test_connection_that_breaks_off_is_made_again() -> None:
    async def main(url: str) -> None:
        link = (await RemoteSandboxes(url).open())._link

        async def next_link() -> object:
            link._socket.transport.abort()
            return await link.connection.link()

        assert await link.connection.thread.run(next_link()) is not link

    with served() as url:
        asyncio.run(main(url))


def test_cancelled_read_of_a_lost_server_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(socket: ServerConnection, asked: dict[str, object]) -> None:
        if asked["op"] == "wait":
            await socket.close()
        elif asked["op"] != "read":
            await socket.send(json.dumps({"call": asked["call"], "handle": 1}))

    async def main(url: str) -> None:
        process = await (await RemoteSandboxes(url).open()).start(["cat"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.read(), 0.1)
        with pytest.raises(ar.SandboxError):
            await process.wait()

    with in_thread(answering(answer)) as url:
        asyncio.run(main(url))
        gc.collect()
    assert caplog.text == ""


def test_lease_that_waits_for_its_sandbox_is_refused() -> None:
    class Slow(FakeSandboxes):
        async def open(self, **_: object) -> FakeSandbox:
            await asyncio.sleep(9)
            return FakeSandbox()

    async def main(url: str) -> wire.Reply:
        async with connect(url.replace("http", "ws") + wire.PATH) as client:
            for call, op in enumerate(("open", "run_python")):
                await client.send(json.dumps({"op": op, "call": call, **REQUESTS[op]}, separators=(",", ":")))
            return wire.load_reply(await client.recv())

    with served(Slow()) as url:
        reply = asyncio.run(main(url))
    assert reply.call == 1 and reply.error is not None and reply.error.type == "RemoteError"
