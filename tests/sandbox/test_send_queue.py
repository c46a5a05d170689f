"""Requests that are longer than a socket has room for: closed, cancelled, or with descriptors, in the middle of one."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent_rl.core.sandbox_loss import Cause
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import Frames, Head, pack
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.send_queue import SendQueue

LARGE = 8 << 20
"""Bytes: far more than a socket has room for."""


@asynccontextmanager
async def unread() -> AsyncIterator[tuple[AgentSandbox, socket.socket]]:
    """A sandbox, and its agent's socket, which nobody reads."""

    async def ended() -> None:
        return None

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    box = AgentSandbox(ours, kill=lambda: None, ended=ended)
    with theirs:
        theirs.send(pack({"ready": True}))
        await box.ready(20)
        yield box, theirs
        await box.close()


async def requests(theirs: socket.socket, count: int) -> list[tuple[Head, int]]:
    """The next requests that come to an agent: their heads, and their bodies' sizes."""
    frames, found = Frames(), list[tuple[Head, int]]()
    while len(found) < count:
        frames.feed(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20))
        while (frame := frames.pop()) is not None:
            found.append((frame[0], len(frame[1])))
    return found


async def begun(box: AgentSandbox) -> asyncio.Task[None]:
    """A call of which a part is sent."""
    call = asyncio.create_task(box.write_file("x", bytes(LARGE)))
    await asyncio.sleep(0.01)
    assert not call.done()
    return call


def test_close_ends_a_call_halfway_through_its_request(run):
    async def main() -> None:
        async with unread() as (box, _):
            call = await begun(box)
            number = box._sock.fileno()
            await box.close()
            with pytest.raises(SandboxError, match="closed") as caught:
                await asyncio.wait_for(call, 20)
            assert caught.value.loss.cause is Cause.CLOSED
            ours, other = socket.socketpair()  # which has the number of the one that was closed
            with ours, other:
                assert number in (ours.fileno(), other.fileno())
                for sock in (ours, other):
                    asyncio.get_running_loop().add_writer(sock, lambda: None)
                    asyncio.get_running_loop().remove_writer(sock)

    run(main())


def test_cancelled_call_is_sent_whole_and_then_cancelled(run):
    async def main() -> None:
        async with unread() as (box, theirs):
            cancelled = await begun(box)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(cancelled, 20)
            call = asyncio.create_task(box.read_file("y"))
            (write, size), (cancel, _), (read, _) = await requests(theirs, 3)
            assert (write["op"], size, cancel) == ("write", LARGE, {"op": "cancel", "id": write["id"]})
            theirs.send(pack({"id": write["id"], "problem": "it took too long"}))
            theirs.send(pack({"id": read["id"], "problem": None}, b"data"))
            assert await call == b"data" and box.loss is None

    run(main())


def test_sandbox_outlives_calls_that_are_cancelled_halfway(box, run):
    async def main() -> None:
        await box.run_python("x = 41")
        for call in (box.write_file("x", bytes(LARGE)), box.exec(["cat"], input=bytes(LARGE))):
            task = asyncio.create_task(call)
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await box.run_python("x + 1")).value == "42" and box.loss is None

    run(main())


def test_cancelled_call_leaves_its_loss_without_complaint(run):
    complaints: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with unread() as (box, _):
            call = await begun(box)
            box._lose("staged")
            call.cancel()  # before it has seen that
            with pytest.raises(asyncio.CancelledError):
                await call
            del call
            gc.collect()
        asyncio.get_running_loop().set_exception_handler(None)

    run(main())
    assert not complaints


async def received(theirs: socket.socket, size: int) -> tuple[bytes, int]:
    """So many bytes that a socket brings, and the number of descriptors that came along."""
    data, count = b"", 0
    while len(data) < size:
        await asyncio.sleep(0.001)
        try:
            more, fds, _, _ = socket.recv_fds(theirs, 1 << 20, 8)
        except BlockingIOError:
            continue
        for fd in fds:
            os.close(fd)
        data, count = data + more, count + len(fds)
    return data, count


def test_send_queue_waits_with_descriptors_until_there_is_room(run):
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for sock in (ours, theirs):
                sock.setblocking(False)
            filled = 0
            while True:  # to the last byte
                try:
                    filled += ours.send(b"x" * 4096)
                except BlockingIOError:
                    break
            queue = SendQueue(ours, pytest.fail)
            queue.use(asyncio.get_running_loop())
            queue.put(b"lend", [theirs.fileno()] * 4)
            dropped = queue.put(b"dropped")
            queue.put(b"last")
            assert queue.withdraw(dropped) and not queue.withdraw(dropped)
            data, count = await received(theirs, filled + 8)
            assert (data[filled:], count) == (b"lendlast", 4)

    run(main())
