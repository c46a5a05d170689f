"""Mutated frames between a server of sandboxes and its clients, in both directions; `tests.sandbox.fuzz` runs it.

A real server hears a client that sends what none would, and a real client hears a server that answers so.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from unittest import mock

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.calls import Command, ExecResult
from agent_rl.sandboxes.process import Launch, Logs, Output, Process
from agent_rl.sandboxes.remote import RemoteSandboxes, wire
from agent_rl.sandboxes.remote.sandbox import RemoteSandbox
from agent_rl.sandboxes.remote.server import SandboxServer
from agent_rl.sandboxes.snapshot import Call, Snapshot
from agent_rl.serving import link
from agent_rl.serving.host import ServerSettings, hosting
from agent_rl.testing import FakeSandbox, FakeSandboxes
from tests.adapters.wire_frames import REQUESTS, reply, request
from tests.sandbox.fuzz import DECLARED, SLOW
from tests.sandbox.mutations import mutated

PATIENCE = 20.0
"""Seconds that an answer may take, on a busy machine."""
LAST_CALL = 10**17
LAST = b'{"op":"capabilities","call":%d}' % LAST_CALL
"""An honest request that follows the others."""
HANDSHAKES = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n",
    b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 3\r\n",
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 99\r\n",
    b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n",
)
PLACES = (b"/elsewhere", b"", b"x://[", b"http:///", b"ws:///", b"ws://127.0.0.1:99999/", b"\xff", b"\t")
"""Where a server may send a client instead: to no other host."""


class _FakeProcess(Process):
    """A process that has ended."""

    async def read(self, max_bytes: int = 1, *, timeout: float = 1.0) -> Output:
        return Output(b"x"[:max_bytes], ended=True)

    async def write(self, data: bytes, *, timeout: float = 1.0) -> None:
        pass

    async def write_eof(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def logs(self, max_bytes: int = 1) -> Logs:
        return Logs("\udcff", "")

    async def wait(self, *, timeout: float = 1.0) -> int | None:
        return 0

    async def signal(self, number: int) -> None:
        pass

    async def resize(self, rows: int, columns: int) -> None:
        pass


class _FakeSandbox(FakeSandbox):
    async def run_command(self, command: Command) -> ExecResult:
        await asyncio.sleep(0)
        return await super().run_command(command)

    async def start_process(self, launch: Launch) -> Process:
        return _FakeProcess()

    async def open_stream(self, address: int | str, timeout: float) -> Process:
        return _FakeProcess()

    async def snapshot(self) -> Snapshot:
        command = Call("run_command", {"command": Command(("true",), b"", "", {}, 1.0, 1)}, "")
        return Snapshot(b"\xff", (command, Call("write_file", {"path": "\udcff", "data": b"x"}, "")))

    async def restore(self, snapshot: Snapshot) -> str | None:
        return str(snapshot.calls)


@dataclass
class _FakeSandboxes(FakeSandboxes):
    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> FakeSandbox:
        if not math.isfinite(lifetime):
            raise ValueError(f"a sandbox for {lifetime} seconds was asked for")
        await asyncio.sleep(0)
        self.opened.append(_FakeSandbox(owner=owner))
        return self.opened[-1]


class _Heard(logging.Handler):
    """What event loops and websockets complain of, where nobody else hears of an exception."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")

    def take(self) -> list[str]:
        """Return what was said since the last time."""
        gc.collect()
        said, self._said = self._said, []
        return said

    @classmethod
    @contextlib.contextmanager
    def listening(cls) -> Iterator[_Heard]:
        """Listen as long as the context lasts."""
        heard, loggers = cls(), [logging.getLogger(name) for name in ("asyncio", "websockets")]
        for logger in loggers:
            logger.addHandler(heard)
        try:
            yield heard
        finally:
            for logger in loggers:
                logger.removeHandler(heard)


# A server, and clients that send what none would


async def fuzz_requests(draw: random.Random, cases: int) -> AsyncIterator[str]:
    """Send a server what no client would; it answers or ends the connection, and serves others."""
    backend = _FakeSandboxes()
    server = SandboxServer("fuzz", backend, ServerSettings(port=0, capacity=3, wait=0.001, ping=PATIENCE))
    with _Heard.listening() as heard:
        async with hosting(server) as url:
            honest, hostile = RemoteSandboxes(url), _Hostile(url, draw)
            for case in range(cases):
                frames = [request(draw, 3 * case + number, hostile.handle) for number in range(draw.choice((1, 1, 3)))]
                said, spent = f"{frames}"[:1000], time.thread_time()
                try:
                    await asyncio.wait_for(hostile.ask(frames), PATIENCE)
                except ConnectionClosed:
                    hostile.leave()
                except Exception as error:
                    yield f"{said}: {error!r}"
                    hostile.leave()
                if (spent := time.thread_time() - spent) > 4 * SLOW:
                    yield f"{said} took {spent:.3f} s"
                if case % 50 == 49:
                    hostile.leave()
                    for complaint in (*await _complaints(server, backend, honest), *heard.take()):
                        yield f"after {said} and those before it, {complaint}"


class _Hostile:
    """A client that sends what none would, on one connection after the other."""

    def __init__(self, url: str, draw: random.Random) -> None:
        self._url, self._draw = url.replace("http", "ws") + wire.PATH, draw
        self._socket: ClientConnection | None = None
        self.handle = 1
        """Of a process, the last that was started."""

    def leave(self) -> None:
        """Break off the connection, if there is one."""
        if self._socket is not None:
            self._socket.transport.abort()
        self._socket = None

    async def ask(self, frames: list[str | bytes]) -> None:
        """Send frames, whole or in pieces, and look at what each is answered.

        Raises:
            ConnectionClosed: if the server has ended the connection.
            Exception: as the server says, where that is none that a request can have.
        """
        draw = self._draw
        if (socket := self._socket) is None:
            socket = self._socket = await connect(self._url, compression=None, proxy=None)
            for op in ("open", "start"):
                await socket.send(json.dumps({"op": op, "call": LAST_CALL, **REQUESTS[op]}, separators=(",", ":")))
                self.handle = wire.load_reply(await socket.recv()).handle or self.handle
        if draw.random() < 0.02:
            socket.transport.write(mutated(draw, b"\x82\x85abcdefghi"))
            socket.transport.close()
        for frame in (*frames, LAST):
            middle = draw.randrange(len(frame) + 1)
            await socket.send([frame[:middle], frame[middle:]] if draw.random() < 0.1 else frame)
        for _ in (*frames, LAST):
            said = wire.load_reply(await socket.recv())
            if said.error is not None and not isinstance(error := said.error.error(), DECLARED):
                raise error
            self.handle = said.handle or self.handle
            if said.call == LAST_CALL and "cancel" in str(frames):  # who is cancelled at once is not answered
                break


async def _complaints(server: SandboxServer, backend: FakeSandboxes, honest: RemoteSandboxes) -> list[str]:
    """Return what is wrong with a server whose hostile clients are gone."""
    until = time.monotonic() + PATIENCE
    while (server.leases.taken or server.leases.waiting or len(server.clients) > 1) and time.monotonic() < until:
        await asyncio.sleep(0.001)
    found = [f"it has {server.health()}"] if time.monotonic() > until else []
    found += ["a sandbox is open"] * (not all(box.closed for box in backend.opened))
    backend.opened.clear()
    box = await honest.open()
    ran = await box.exec(["true"])
    await box.close()
    return found + ([f"a command came out as {ran}"] if ran.returncode else [])


# A client, and servers that answer what none would


class _Stub:
    """A server whose first answer to each request has mistakes in it, if it is told to make any."""

    def __init__(self) -> None:
        self.draw: random.Random | None = None

    async def connected(self, socket: ServerConnection) -> None:
        """Answer a client."""
        with contextlib.suppress(ConnectionClosed):
            async for data in socket:
                call, draw = json.loads(data)["call"], self.draw
                if draw is not None and draw.random() < 0.5:
                    await socket.send(reply(draw, call))
                if draw is not None and draw.random() < 0.02:
                    socket.transport.write(draw.randbytes(9))
                    socket.transport.close()  # it may have been the beginning of a frame
                await socket.send(reply(None, call))  # which counts where the first one answered nothing

    async def refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a handshake."""
        draw = self.draw or random.Random()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            place = b"Location: %s\r\n" % draw.choice(PLACES) if draw.random() < 0.5 else b""
            writer.write(mutated(draw, draw.choice(HANDSHAKES)) + place + b"\r\nxyz")
        writer.close()


async def _speak(sandboxes: RemoteSandboxes, box: RemoteSandbox) -> None:
    async with await box.start(["cat"]) as process:
        await process.write(b"x" * 9)
        await process.read(9)
        await process.write_eof()
        await process.logs()
        await process.resize(9, 9)
        await process.kill()
        await process.wait()


async def _open(sandboxes: RemoteSandboxes, box: RemoteSandbox) -> None:
    await (await sandboxes.open()).close()


_CALLS: tuple[Callable[[RemoteSandboxes, RemoteSandbox], Awaitable[object]], ...] = (
    lambda _, box: box.exec(["true"]),
    lambda _, box: box.run_python("1"),
    lambda _, box: box.read_file("x"),
    lambda _, box: box.write_file("x", b"x"),
    lambda _, box: box.snapshot(),
    lambda _, box: box.restore(Snapshot(b"x")),
    lambda _, box: box.stream(80),
    lambda sandboxes, _: sandboxes.capabilities(),
    _open,
    _speak,
)


async def fuzz_replies(draw: random.Random, cases: int) -> AsyncIterator[str]:
    """Answer a client what no server would; its calls end with a result or a declared error."""
    stub, box, seed = _Stub(), None, 0
    with _Heard.listening() as heard:
        async with serve(stub.connected, "127.0.0.1", 0, compression=None, max_size=None) as listening:
            sandboxes = RemoteSandboxes(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            for case in range(cases):
                if box is None or box.loss is not None or box._link.lost:
                    stub.draw = None
                    try:
                        box = await _opened(sandboxes)
                    except Exception as error:
                        yield f"after answers of {seed}, no sandbox can be opened: {error!r}"
                        return
                stub.draw, spent = random.Random(seed := draw.getrandbits(64)), time.process_time()
                if finding := await _undeclared(draw.choice(_CALLS)(sandboxes, box)):
                    yield f"answers of {seed}: {finding}"
                if (spent := time.process_time() - spent) > 4 * SLOW:
                    yield f"answers of {seed} took {spent:.3f} s"
                for complaint in heard.take() if case % 50 == 49 else ():
                    yield f"after answers of {seed}: {complaint}"


async def _opened(sandboxes: RemoteSandboxes) -> RemoteSandbox:
    """Open a sandbox, of a server that may still end the connection of the calls before."""
    with contextlib.suppress(SandboxError):
        return await sandboxes.open()
    return await sandboxes.open()


async def fuzz_handshakes(draw: random.Random, cases: int) -> AsyncIterator[str]:
    """Answer a client that connects what no server would."""
    stub = _Stub()
    stub.draw = draw
    async with await asyncio.start_server(stub.refuse, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        connection = link.Connection(url, wire.load_reply, "nobody")
        with mock.patch.object(link, "PAUSES", (0.0,)):
            for case in range(cases):
                if finding := await _undeclared(connection.link()):
                    yield f"handshake {case}: {finding}"
        connection.thread.close()


async def _undeclared(call: Awaitable[object]) -> str | None:
    """Await a call; return what it raises, where that is not declared, and no exception of the server's own."""
    try:
        await asyncio.wait_for(call, PATIENCE)
    except DECLARED:
        pass
    except Exception as error:
        if not any(note.startswith("on http") for note in getattr(error, "__notes__", ())):
            return f"{error!r}"
    return None
