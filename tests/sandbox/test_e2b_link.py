"""Whose act a broken connection to a microVM is: the service's, or that of the code in it."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable

import pytest

from agent_rl.core.sandbox_loss import Cause
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import pack
from agent_rl.sandboxes.client.hosted import LinkedSandbox
from agent_rl.sandboxes.e2b.link import E2BLink

e2b = pytest.importorskip("e2b")


class Machine:
    """A microVM whose stdin, or whose command, fails as told after the agent's first frame."""

    def __init__(self, error: Exception, runs: bool | Exception, at: str) -> None:
        self.error, self.runs, self.at = error, runs, at
        self.commands, self.pid = self, 7
        self.sent = asyncio.Event()

    async def run(self, *args: object, on_stdout: Callable[[str], Awaitable[None]], **options: object) -> Machine:
        await on_stdout(base64.b64encode(pack({"ready": True})).decode() + "\n")
        return self

    async def send_stdin(self, pid: int, data: bytes) -> None:
        if data != b"greeting":
            self.sent.set()
            if self.at == "stdin":
                raise self.error

    async def wait(self) -> None:
        await (self.sent.wait() if self.at == "command" else asyncio.Event().wait())
        raise self.error

    async def is_running(self) -> bool:
        if isinstance(self.runs, Exception):
            raise self.runs
        return self.runs

    async def kill(self) -> None:
        """Nothing is there to be killed."""


@pytest.mark.parametrize("at", ["stdin", "command"])
@pytest.mark.parametrize(
    ("error", "runs", "cause"),
    [
        (e2b.TimeoutException("late"), True, Cause.BACKEND_GONE),
        (e2b.RateLimitException("too many"), True, Cause.BACKEND_GONE),
        (ConnectionError("reset"), ConnectionError("nobody there"), Cause.BACKEND_GONE),
        (e2b.SandboxException("gone"), False, Cause.AGENT_ENDED),
        (e2b.NotFoundException("no such process"), True, Cause.AGENT_ENDED),
    ],
    ids=["late", "refused", "unreachable", "the microVM is gone", "the agent is gone"],
)
def test_broken_connection_counts_as_its_breaker(run, error: Exception, runs: bool | Exception, cause: Cause, at: str):
    async def main() -> Cause:
        link = E2BLink(Machine(error, runs, at))  # type: ignore[arg-type]
        box = LinkedSandbox(link, expires=time.monotonic() + 600)
        await link.begin(b"greeting")
        await box.ready(20)
        try:
            if cause is Cause.BACKEND_GONE:
                with pytest.raises(SandboxError, match="E2B broke the connection off"):
                    await box.exec(["true"])
            else:
                assert (await box.exec(["true"])).sandbox_lost
        finally:
            await box.close()
        return box.loss.cause

    assert run(main()) is cause
