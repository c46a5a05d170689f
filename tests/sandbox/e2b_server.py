"""A stand-in for E2B that speaks its wire format to the real SDK; its microVMs are local jails.

What starts the agent in a microVM is not run here, as a jail has its agent: from the greeting on, the command's stdin
and stdout are that agent's. HTTP, authentication, Connect streams and the service's timeouts are as the SDKs expect.
The events of the code interpreter are those of E2B's own server (github.com/e2b-dev/code-interpreter).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof

from agent_rl.sandboxes.agent.frames import pack
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.e2b.jupyter import SWEEP
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import E2B_KEY, LIMITS
from tests.sandbox.e2b_machine import Context, Machine, wait_gone

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Service(Process):
    """The control plane and every microVM's envd."""

    def __init__(self, limits: Limits) -> None:
        self.jails = LocalSandboxes(limits, tier="jail", require=())
        self.machines: dict[str, Machine] = {}
        self.envd = ProcessASGIApplication(self)
        self.seen: list[str] = []

    # envd

    def _machine(self, context: Any) -> Machine:
        headers = {name.lower(): value for name, value in context.request_headers.items()}
        machine = self.machines.get(headers.get("e2b-sandbox-id", ""))
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        if headers.get("x-access-token") != machine.token:
            raise ConnectError(Code.UNAUTHENTICATED, "bad token")
        return machine

    async def start(self, request: Any, context: Any) -> AsyncIterator[Any]:
        machine, event = self._machine(context), pb.ProcessEvent
        yield pb.StartResponse(event=event(event=Oneof("start", event.StartEvent(pid=7))))
        if request.process.args[-1] == SWEEP:
            if not await wait_gone(machine, asyncio.ensure_future(machine.sweep())):
                raise ConnectError(Code.UNAVAILABLE, "the sandbox was killed")
        else:
            async for output in self._agent(machine):
                yield pb.StartResponse(
                    event=event(event=Oneof("data", event.DataEvent(output=Oneof("stdout", output))))
                )
        end = event.EndEvent(exit_code=0, exited=True, status="exit status 0")
        yield pb.StartResponse(event=event(event=Oneof("end", end)))

    async def _agent(self, machine: Machine) -> AsyncIterator[bytes]:
        """Yield the output of the agent's command."""
        while not machine.greeted:
            await asyncio.sleep(0.005)
        data = pack({"ready": True})
        while data:
            line = base64.b64encode(data) + b"\n"
            for piece in (line[: len(line) // 2], line[len(line) // 2 :]):  # cut anywhere
                yield piece
            reading = asyncio.ensure_future(machine.to_host.get())
            if not await wait_gone(machine, reading):
                raise ConnectError(Code.UNAVAILABLE, "the sandbox was killed")
            data = reading.result()

    async def send_input(self, request: Any, context: Any) -> Any:
        machine, data = self._machine(context), bytes(request.input.input.value)
        if not machine.greeted:
            machine.greeting += data
            size = 4 + struct.unpack(">I", machine.greeting[:4])[0] if len(machine.greeting) >= 4 else 1 << 30
            if len(machine.greeting) < size:
                return pb.SendInputResponse()
            data, machine.greeted = machine.greeting[size:], True
        await machine.send(data)
        return pb.SendInputResponse()

    # HTTP

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = str(scope["path"]), str(scope["method"])
        self.seen.append(f"{method} {path}")
        if path.startswith("/process.Process/"):
            await self.envd(scope, receive, send)  # type: ignore[arg-type]
            return
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), bool(message.get("more_body"))
        asked = json.loads(body or b"{}")
        if path.startswith(("/execute", "/contexts")):
            status, answer = await self._interpreter(method, path, headers, asked)
        else:
            status, answer = await self._control(method, path, headers, asked)
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        if isinstance(answer, AsyncIterator):
            with contextlib.suppress(asyncio.CancelledError):  # the microVM ended amid it
                async for event in answer:
                    line = json.dumps(event).encode() + b"\n"
                    await send({"type": "http.response.body", "body": line, "more_body": True})
                await send({"type": "http.response.body", "body": b'{"type": "end_of_execution"}\n'})
            return
        await send({"type": "http.response.body", "body": b"" if answer is None else json.dumps(answer).encode()})

    async def _interpreter(self, method: str, path: str, headers: dict[str, str], asked: Any) -> tuple[int, Any]:
        """Answer for the code interpreter of a microVM, which listens there at a port of its own."""
        machine = self.machines.get(headers.get("e2b-sandbox-id", ""))
        if machine is None or headers.get("e2b-sandbox-port") != "49999":
            return 502, {"message": "The sandbox was not found"}
        if (method, path) == ("POST", "/contexts"):
            context = Context(asked.get("cwd", "/home/user"))
            machine.contexts[context.id] = context
            return 200, context.listed()
        if (method, path) == ("GET", "/contexts"):
            return 200, [context.listed() for context in machine.contexts.values()]
        found = machine.contexts.get(asked["context_id"] if path == "/execute" else path.split("/")[2])
        if found is None:
            return 404, "Context not found"
        if path == "/execute":
            known = headers.get("x-access-token") == machine.token
            return (200, machine.execute(asked["code"], found)) if known else (401, "bad token")
        if method == "DELETE":
            del machine.contexts[found.id]
        elif not await wait_gone(machine, asyncio.ensure_future(machine.restart(found))):
            return 502, {"message": "The sandbox was not found"}
        return 200, None

    async def _control(self, method: str, path: str, headers: dict[str, str], asked: Any) -> tuple[int, Any]:
        if path == "/health":
            known = headers.get("e2b-sandbox-id") in self.machines
            return (204, None) if known else (502, {"message": "was not found"})
        if headers.get("x-api-key") != E2B_KEY:
            return 401, {"code": 401, "message": "no such key"}
        if method == "POST" and path.endswith("/sandboxes"):
            name = f"i{uuid.uuid4().hex[:19]}"
            machine = self.machines[name] = Machine(await self.jails.open(owner=name), asked)
            machine.begin()
            loop = asyncio.get_running_loop()
            machine.timer = loop.call_later(asked["timeout"], lambda: asyncio.ensure_future(self.end(name)))
            about = {"templateID": asked["templateID"], "sandboxID": name, "clientID": "c", "envdVersion": "0.6.9"}
            return 201, {**about, "envdAccessToken": machine.token, "domain": None}
        if method == "DELETE" and "/sandboxes/" in path:
            ended = await self.end(path.rpartition("/")[2])
            return (204, None) if ended else (404, {"code": 404, "message": "not found"})
        return 404, {"code": 404, "message": f"no route {path}"}

    async def end(self, name: str) -> bool:
        """End a microVM; return whether there was one."""
        machine = self.machines.pop(name, None)
        if machine is None:
            return False
        await machine.end()
        return True


@contextlib.asynccontextmanager
async def serve(limits: Limits) -> AsyncIterator[tuple[Service, str]]:
    """Run the service on loopback; yield it and its address."""
    service = Service(limits)
    config = uvicorn.Config(service, port=0, lifespan="off", log_level="error", ws="none")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield service, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        for name in tuple(service.machines):
            await service.end(name)
        await service.jails.close()
        server.should_exit = server.force_exit = True
        await running


async def main() -> None:
    """Serve until stdin ends."""
    async with serve(LIMITS) as (_, address):
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
