"""Answers about processes that an agent should not give, and sandboxes that are lost while a process is spoken to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from agent_rl.core.sandbox_loss import Cause
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import MAX_STRAYS, Frames, Head, pack
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.process import ProcessError

Answer = Callable[[Head], bytes]


@asynccontextmanager
async def with_agent(answer: Answer, failure: str | None = None) -> AsyncIterator[AgentSandbox]:
    """A sandbox whose agent starts processes as it should, and answers everything else like this."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def ended() -> str | None:
        return failure

    async def serve() -> None:
        loop, frames = asyncio.get_running_loop(), Frames()
        await loop.sock_sendall(theirs, pack({"ready": True}))
        while data := await loop.sock_recv(theirs, 65536):
            frames.feed(data)
            while (frame := frames.pop()) is not None:
                head = frame[0]
                sent = pack({"id": head["id"], "handle": head["id"]}) if head["op"] == "start" else answer(head)
                await loop.sock_sendall(theirs, sent)
                if not sent:
                    theirs.shutdown(socket.SHUT_RDWR)

    box = AgentSandbox(ours, kill=lambda: None, ended=ended)
    serving = asyncio.create_task(serve())
    await box.ready(5)
    try:
        yield box
    finally:
        serving.cancel()
        await box.close()
        theirs.close()


def taken(head: Head, data: bytes, **others: object) -> bytes:
    return pack({"id": head["id"], "at": head.get("at", 0), "ended": False, **others}, data)


@pytest.mark.parametrize(
    "answer",
    [
        lambda head: taken(head, b"x" * 101),
        lambda head: taken(head, b"x", at=-1),
        lambda head: taken(head, b"x", at="0"),
        lambda head: pack({"id": head["id"], "at": 0}, b"x"),
        lambda head: b"\xff" * 64,
        lambda head: pack({"id": 99}) * (MAX_STRAYS + 2),
        lambda head: pack({"id": [1]}) * (MAX_STRAYS + 2),
        lambda head: pack({"id": True, "at": 0, "ended": False}, b"x") * (MAX_STRAYS + 2),
    ],
    ids=["too long", "before", "no number", "lacking", "no frame", "of nobody", "of a list", "of a truth"],
)
def test_read_takes_no_forged_answer(run, answer: Answer):
    async def main() -> Cause:
        async with with_agent(answer) as box:
            process = await box.start(["sh"])
            with pytest.raises(ProcessError, match="was lost"):
                await process.read(100)
            return box.loss.cause

    assert run(main()) is Cause.BAD_FRAME


def test_answer_with_the_id_of_another_request_reaches_no_other(run):
    heads: list[Head] = []

    def answer(head: Head) -> bytes:
        heads.append(head)
        if len(heads) < 2:
            return pack({"id": 0})
        first, second = (head for head in heads[:2])
        return taken(second, b"second") * 2 + taken(first, b"first")  # the copy is a stray

    async def main() -> list[bytes]:
        async with with_agent(answer) as box:
            one, two = await box.start(["sh"]), await box.start(["sh"])
            outputs = await asyncio.gather(one.read(), two.read())
            return [output.data for output in outputs]

    assert run(main()) == [b"first", b"second"]


@pytest.mark.parametrize(("failure", "cause"), [(None, Cause.AGENT_ENDED), ("the engine is gone", Cause.BACKEND_GONE)])
def test_loss_while_a_process_is_read_keeps_its_cause(run, failure, cause):
    async def main() -> Cause:
        async with with_agent(lambda head: b"", failure) as box:
            process = await box.start(["sh"])
            with pytest.raises(SandboxError if failure else ProcessError, match="was lost"):
                await process.read()
            with pytest.raises(SandboxError if failure else ProcessError, match="was lost"):
                await box.start(["sh"])
            return box.loss.cause

    assert run(main()) is cause
