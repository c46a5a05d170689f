"""Doubles of the SDKs of Modal and Daytona: every sandbox is a local jail, whose agent answers the host.

Each notes the calls that it gets by the name of the real function: `test_hosted.py` binds them to its signature.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from agent_rl.sandboxes.agent.frames import CHUNK, pack
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import LIMITS

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


class GoneError(Exception):
    """The service knows of no such sandbox."""


class LateError(Exception):
    """The service did not answer in time."""


class Agent:
    """A jail's agent, spoken to as the first bytes were: after the greeting."""

    def __init__(self) -> None:
        self.jails = LocalSandboxes(LIMITS, tier="jail", require=())
        self.breaks: Exception | None = None
        self.runs = True
        self._greeting: bytes | None = b""

    async def open(self) -> None:
        self.jail = await self.jails.open()
        self.jail._loop.remove_reader(self.jail._sock)  # type: ignore[union-attr]

    async def write(self, data: bytes) -> None:
        if self._greeting is not None:
            data = self._greeting = self._greeting + data
            if len(data) < 4 or len(data) < (size := 4 + struct.unpack(">I", data[:4])[0]):
                return
            data, self._greeting = data[size:], None
        elif self.breaks is not None:
            raise self.breaks
        await asyncio.get_running_loop().sock_sendall(self.jail._sock, data)

    async def output(self) -> AsyncIterator[bytes]:
        while self._greeting is not None:
            await asyncio.sleep(0.001)
        yield pack({"ready": True})
        while data := await asyncio.get_running_loop().sock_recv(self.jail._sock, CHUNK):
            yield data

    async def end(self) -> None:
        self.runs = False
        await self.jail.close()
        await self.jails.close()


def both(call: Callable[..., Awaitable[Any]]) -> Any:
    """Return what the `modal` SDK has for a coroutine function: it is `name.aio`."""
    return SimpleNamespace(aio=call)


def fake_modal(agents: list[Agent], calls: Calls) -> Any:
    """Return the module `modal`."""

    async def lookup(*args: Any, **options: Any) -> object:
        calls.append(("App.lookup", args, options))
        return "the app"

    def from_registry(*args: Any, **options: Any) -> object:
        calls.append(("Image.from_registry", args, options))
        return "the image"

    async def create(*args: Any, **options: Any) -> object:
        calls.append(("Sandbox.create", args, options))
        agent = Agent()
        agents.append(agent)
        await agent.open()
        waiting: list[bytes] = []

        async def drain() -> None:
            while waiting:
                await agent.write(waiting.pop(0))

        async def execute(*args: Any, **options: Any) -> object:
            calls.append(("Sandbox.exec", (None, *args), options))
            stdin = SimpleNamespace(write=waiting.append, drain=both(drain))
            return SimpleNamespace(stdin=stdin, stdout=agent.output())

        async def poll() -> int | None:
            return None if agent.runs else 137

        return SimpleNamespace(exec=both(execute), terminate=both(agent.end), poll=both(poll))

    return SimpleNamespace(
        App=SimpleNamespace(lookup=both(lookup)),
        Image=SimpleNamespace(from_registry=from_registry),
        Sandbox=SimpleNamespace(create=both(create)),
        stream_type=SimpleNamespace(StreamType=SimpleNamespace(DEVNULL=-3)),
        exception=SimpleNamespace(
            NotFoundError=GoneError, SandboxTerminatedError=GoneError, SandboxTimeoutError=GoneError
        ),
    )


def fake_daytona(agents: list[Agent], calls: Calls) -> Any:
    """Return the module `daytona`."""

    def noted(name: str, answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            calls.append((name, (None, *args), options))
            return await answer(*args, **options)

        return call

    def settings(name: str) -> Callable[..., Any]:
        def make(**options: Any) -> object:
            calls.append((name, (), options))
            return SimpleNamespace(**options)

        return make

    async def nothing(*args: Any) -> None:
        """Answer as the service does."""

    async def create(wanted: Any, timeout: float) -> object:
        agent = Agent()
        agents.append(agent)
        await agent.open()

        async def execute(session: str, asked: Any) -> object:
            return SimpleNamespace(cmd_id="7")

        async def send(session: str, command: str, data: str) -> None:
            assert command == "7" and data.endswith("\n")
            await agent.write(base64.b64decode(data))

        async def follow(
            session: str, command: str, on_stdout: Callable[[str], Awaitable[None]], on_stderr: Any
        ) -> None:
            async for data in agent.output():
                line = base64.b64encode(data).decode() + "\n"
                await on_stdout(line[:5])  # cut anywhere
                await on_stdout(line[5:])

        process = SimpleNamespace(
            create_session=noted("process.create_session", nothing),
            execute_session_command=noted("process.execute_session_command", execute),
            send_session_command_input=noted("process.send_session_command_input", send),
            get_session_command_logs_async=noted("process.get_session_command_logs_async", follow),
        )
        made = SimpleNamespace(process=process, fs=SimpleNamespace(upload_file=noted("fs.upload_file", nothing)))

        async def refresh() -> None:
            made.state = "started" if agent.runs else "destroyed"

        made.refresh_data, made.end = noted("refresh_data", refresh), agent.end
        return made

    async def delete(sandbox: Any) -> None:
        await sandbox.end()

    def client(config: Any) -> object:
        return SimpleNamespace(
            create=noted("create", create), delete=noted("delete", delete), close=noted("close", nothing)
        )

    return SimpleNamespace(
        AsyncDaytona=client,
        DaytonaNotFoundError=GoneError,
        DaytonaGoneError=GoneError,
        **{
            name: settings(name)
            for name in ("DaytonaConfig", "CreateSandboxFromSnapshotParams", "SessionExecuteRequest")
        },
    )
