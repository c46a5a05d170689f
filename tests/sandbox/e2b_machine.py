"""A microVM of the stand-in for E2B: a local jail, whose agent answers the host, the code interpreter and root.

The Jupyter kernel is the jail's interpreter. What prepares a kernel is not run here (`test_e2b_kernel.py` does, in a
real one), and to kill everything as root is to end that interpreter and what else runs in the jail.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from agent_rl.sandboxes.agent.frames import CHUNK, Frames, Head, pack
from agent_rl.sandboxes.agent.plots import answer_from_body
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.e2b.jupyter import PREPARE

KEEPALIVE = 0.5
LAG = 0.3
"""Seconds until the service passes on the last words of a kernel that was killed."""
OURS = 1 << 40
"""The host's calls have smaller numbers."""
EngineOutput = tuple[Head, bytes]


@dataclass
class Context:
    """A Jupyter kernel, as the service lists it."""

    cwd: str
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    count: int = 0

    def listed(self) -> dict[str, str]:
        return {"id": self.id, "language": "python", "cwd": self.cwd}


@dataclass
class Machine:
    """A microVM."""

    jail: AgentSandbox
    asked: dict[str, Any]
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    greeted: bool = False
    greeting: bytes = b""
    timer: asyncio.TimerHandle | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    to_host: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    contexts: dict[str, Context] = field(default_factory=dict)
    deaf: bool = False
    """Whether the service seems hung: no command of root, restart or end of a stream happens."""
    sweeps: int = 0
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(OURS))
    _answers: dict[int, asyncio.Future[EngineOutput]] = field(default_factory=dict)
    _running: int | None = None
    _pump: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Take over the jail's connection, untouched so far."""
        self.jail._loop.remove_reader(self.jail._sock)  # type: ignore[union-attr]
        self._pump = asyncio.create_task(self._carry())

    async def end(self) -> None:
        if self.gone.is_set():
            return
        if self.timer is not None:
            self.timer.cancel()
        self.gone.set()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait((self._pump,))
        await self.jail.close()

    async def send(self, data: bytes) -> None:
        """Pass the host's message to the agent."""
        await asyncio.get_running_loop().sock_sendall(self.jail._sock, data)

    async def _carry(self) -> None:
        """Separate the answers for the host from those for the stand-in."""
        frames = Frames()
        try:
            while data := await asyncio.get_running_loop().sock_recv(self.jail._sock, CHUNK):
                frames.feed(data)
                while (frame := frames.pop()) is not None:
                    waiting = self._answers.pop(frame[0].get("id"), None)  # type: ignore[arg-type]
                    if waiting is None:
                        self.to_host.put_nowait(pack(*frame))
                    elif not waiting.done():
                        waiting.set_result(frame)
        finally:
            self.to_host.put_nowait(b"")
            for waiting in self._answers.values():
                waiting.cancel()

    async def _ask(self, number: int, op: str, body: bytes = b"", **head: Any) -> EngineOutput:
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self.send(pack({"op": op, "id": number, **head}, body))
        return await self._answers[number]

    # As root

    async def sweep(self) -> None:
        """Kill the kernel and the processes left by code."""
        self.sweeps += 1
        if self.deaf:
            await self.gone.wait()
        if self._running is not None:
            await self.send(pack({"op": "cancel", "id": self._running}))
            while self._running is not None:
                await asyncio.sleep(0.002)
        await self._ask(next(self._numbers), "python", b"import os; os._exit(0)", timeout=2.0, keep=100)
        await self._ask(next(self._numbers), "exec", argv=["true"], cwd="/work", env={}, timeout=20.0, keep=100)

    # The code interpreter

    async def restart(self, context: Context) -> None:
        if self.deaf:
            await self.gone.wait()
        context.count = 0

    async def execute(self, code: str, context: Context) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a piece of code, but for the last."""
        context.count += bool(code.strip()) or not context.count
        yield {"type": "number_of_executions", "execution_count": context.count}
        if code == PREPARE:
            return
        number = self._running = next(self._numbers)
        asking = asyncio.ensure_future(self._ask(number, "python", code.encode(), timeout=86400.0, keep=1 << 20))
        try:
            while self.deaf or not (await asyncio.wait((asking,), timeout=KEEPALIVE))[0]:
                yield {"type": "keepalive"}
                await asyncio.sleep(KEEPALIVE if self.deaf else 0)
            head, body = answer_from_body(*asking.result())
        finally:
            asking.cancel()
            self._running = None
        await asyncio.sleep(LAG if head["lost"] else 0)
        for event in events(head, body):
            yield event


def events(head: Head, body: bytes) -> list[dict[str, Any]]:
    """Return the service's form of an answer, without empty fields."""
    cut = int(str(head["out"]))
    said: list[dict[str, Any]] = [
        {"type": name, "text": data.decode("utf-8", "backslashreplace"), "timestamp": "2026-01-01T00:00:00Z"}
        for name, data in (("stdout", body[:cut]), ("stderr", body[cut:]))
        if data
    ]
    if head["lost"]:
        return [
            *said,
            {"type": "error", "name": "ContextRestarting", "value": "Context was restarted", "traceback": ""},
        ]
    if head["error"] is not None:
        trace = str(head["error"])
        name, _, value = trace.strip().split("\n")[-1].partition(": ")
        return [*said, {"type": "error", "name": name, "value": value, "traceback": trace}]
    if head["value"] is not None:
        return [*said, {"type": "result", "text": head["value"], "extra": {}, "is_main_result": True}]
    return said


async def wait_gone(machine: Machine, task: asyncio.Future[Any]) -> bool:
    """Wait for a task, or the microVM's end; return whether the task was done."""
    ending = asyncio.ensure_future(machine.gone.wait())
    await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return False
    return not task.cancelled()
