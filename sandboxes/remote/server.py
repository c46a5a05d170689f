"""The server: opens sandboxes for clients on other machines, each in a place that its client leases.

A place is free again when its client gives it back or is gone, when its sandbox's lifetime is over, or when nothing was
asked of it for its time to live. The sandbox is closed in each case.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import RemoteError, SandboxError
from agent_rl.sandboxes.base import Sandbox, Sandboxes
from agent_rl.sandboxes.calls import ExecResult, PythonResult
from agent_rl.sandboxes.process import Process, ProcessError, Stream
from agent_rl.sandboxes.remote import packing, wire
from agent_rl.sandboxes.remote.wire import Reply
from agent_rl.serving.frames import Cancel
from agent_rl.serving.host import Host, ServerSettings, hosting, problem
from agent_rl.serving.leases import Lease, Owner

PATIENCE = 30.0
"""Seconds that calls have to stop when their sandbox is closed."""
T = TypeVar("T", ExecResult, PythonResult)


@contextlib.asynccontextmanager
async def serving(name: str, sandboxes: Sandboxes, settings: ServerSettings) -> AsyncGenerator[str, None]:
    """Serve a backend as long as the context lasts, and close it; yield the server's address.

    Raises:
        ConfigError: if websockets is not installed, or the address or the certificate can't be used.
    """
    try:
        async with hosting(SandboxServer(name, sandboxes, settings)) as url:
            yield url
    finally:
        await sandboxes.close()


@dataclass(eq=False, kw_only=True)
class SandboxLease(Lease):
    """A lease of one sandbox."""

    sandbox: Sandbox | None = None
    streams: dict[int, Stream] = field(default_factory=dict)
    """Its processes and streams, by handle."""


class SandboxServer(Host[SandboxLease]):
    """A backend that is served, and its clients."""

    path = wire.PATH

    def __init__(self, name: str, sandboxes: Sandboxes, settings: ServerSettings) -> None:
        super().__init__(settings)
        self._name, self._sandboxes = name, sandboxes
        self._handles = itertools.count(1)

    def about(self) -> Mapping[str, object]:
        """Return the backend's name."""
        return {"sandboxes": self._name}

    def failure(self, call: int, error: BaseException) -> Reply:
        """Return the reply to a call that failed, with the cause of a loss."""
        loss = error.loss if isinstance(error, SandboxError) else None
        said = problem(error)
        told = wire.Problem(type=said.type, message=said.message, traceback=said.traceback)
        return Reply(call=call, error=told.model_copy(update={"loss": loss}), **self._places())

    async def clear(self, lease: SandboxLease) -> None:
        """Close a lease's sandbox."""
        if lease.sandbox is not None:
            await lease.sandbox.close()

    async def reply(self, owner: Owner[SandboxLease], data: str | bytes) -> Reply:
        """Do what a request wants."""
        asked = wire.load_request(data)
        match asked:
            case wire.Capabilities():
                return Reply(call=asked.call, capabilities=dict(await self._sandboxes.capabilities()))
            case wire.Open():
                await self._open(owner, asked)
            case Cancel():
                owner.cancel(asked.of)
            case wire.Close():
                if (found := owner.leases.get(asked.lease)) is not None:
                    await self.release(found)
            case _:
                lease = self._find(owner, asked.lease)
                if (sandbox := lease.sandbox) is None:
                    raise RemoteError("the lease waits for its sandbox: use it once it is open")
                with self.leases.working(lease):
                    try:
                        if isinstance(asked, wire.OfStream):
                            reply = await self._ask_stream(lease, asked)
                        else:
                            reply = await self._ask_sandbox(lease, sandbox, asked)
                    except Exception as error:
                        reply = self.failure(asked.call, error)
                return reply.model_copy(update={"loss": sandbox.loss})
        return Reply(call=asked.call, **self._places())

    def _places(self) -> dict[str, int]:
        return {"taken": self.leases.taken + self.leases.waiting, "capacity": self.leases.capacity}

    def _find(self, owner: Owner[SandboxLease], id: str) -> SandboxLease:
        """Return a lease whose sandbox is open.

        Raises:
            SandboxError: if there is none.
        """
        try:
            return owner.find(id)
        except RemoteError as error:
            raise SandboxError(f"the sandbox was lost: {error}", SandboxLoss(Cause.LIFETIME, str(error))) from None

    async def _open(self, owner: Owner[SandboxLease], asked: wire.Open) -> None:
        lease = SandboxLease(asked.lease, owner, PATIENCE)
        async with self.opening(lease, min(asked.wait, self.settings.wait)):
            lease.until = self.leases.clock() + asked.lifetime
            lease.sandbox = await self._sandboxes.open(owner=asked.owner, limits=asked.limits, lifetime=asked.lifetime)

    async def _ask_sandbox(self, lease: SandboxLease, sandbox: Sandbox, asked: wire.OfSandbox) -> Reply:
        """Call a method of a sandbox."""
        reply = Reply(call=asked.call)
        match asked:
            case wire.RunCommand(command=c):
                ran = await sandbox.exec(
                    c.argv,
                    input=c.input,
                    cwd=c.cwd,
                    env=c.env,
                    timeout=c.timeout,
                    max_output=c.max_output,
                    limits=c.limits,
                    user=c.user or None,
                )
                ran, out, err = _without_texts(ran)
                reply = Reply(call=asked.call, executed=ran, out=out, err=err)
            case wire.RunPython():
                result = await sandbox.run_python(
                    packing.unpack_code(asked.code), timeout=asked.timeout, max_output=asked.max_output
                )
                result, out, err = _without_texts(result)
                reply = Reply(call=asked.call, ran=result, out=out, err=err)
            case wire.ReadFile():
                data = await sandbox.read_file(asked.path, max_bytes=asked.max_bytes)
                reply = Reply(call=asked.call, data=data)
            case wire.WriteFile():
                await sandbox.write_file(asked.path, asked.data)
            case wire.TakeSnapshot():
                reply = Reply(call=asked.call, snapshot=packing.pack_snapshot(await sandbox.snapshot()))
            case wire.Restore():
                reply = Reply(call=asked.call, missing=await sandbox.restore(packing.unpack_snapshot(asked.snapshot)))
            case wire.Start(launch=a):
                process = await sandbox.start(
                    a.argv, cwd=a.cwd, env=a.env, limits=a.limits, pty=a.pty, user=a.user or None
                )
                reply = self._keep(lease, asked.call, process)
            case wire.Connect():
                stream = await sandbox.stream(asked.address, timeout=asked.timeout)
                reply = self._keep(lease, asked.call, stream)
            case _:
                raise RemoteError(f"{asked.op} can't be asked of a sandbox")
        return reply

    def _keep(self, lease: SandboxLease, call: int, stream: Stream) -> Reply:
        handle = next(self._handles)
        lease.streams[handle] = stream
        return Reply(call=call, handle=handle)

    async def _ask_stream(self, lease: SandboxLease, asked: wire.OfStream) -> Reply:
        """Call a method of a process or a stream."""
        reply, stream = Reply(call=asked.call), lease.streams.get(asked.handle)
        match asked, stream:
            case wire.EndStream(), None:
                pass
            case wire.EndStream(), Stream():
                del lease.streams[asked.handle]
                await stream.close()
            case _, None:
                raise ProcessError("there is no such process any more: it was closed")
            case wire.Read(), Stream():
                output = await stream.read(asked.max_bytes, timeout=asked.timeout)
                reply = Reply(call=asked.call, output=output)
            case wire.Write(), Stream():
                await stream.write(asked.data, timeout=asked.timeout)
            case wire.WriteEof(), Stream():
                await stream.write_eof()
            case wire.ReadLogs(), Process():
                reply = Reply(call=asked.call, logs=await stream.logs(asked.max_bytes))
            case wire.Wait(), Process():
                reply = Reply(call=asked.call, status=await stream.wait(timeout=asked.timeout))
            case wire.Signal(), Process():
                await stream.signal(asked.number)
            case wire.Resize(), Process():
                await stream.resize(asked.rows, asked.columns)
            case _:
                raise RemoteError(f"{asked.op} can't be asked of a stream")
        return reply


def _without_texts(result: T) -> tuple[T, bytes, bytes]:
    """Return a result without its outputs, and these as they are sent."""
    (out, out_is_cut), (err, err_is_cut) = packing.pack_text(result.stdout), packing.pack_text(result.stderr)
    is_cut = result.truncated or out_is_cut or err_is_cut
    return replace(result, stdout="", stderr="", truncated=is_cut), out, err
