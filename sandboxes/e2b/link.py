"""The way to an agent in a microVM of E2B: one command of it, whose output the SDK hands over as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_rl.sandboxes.client.hosted import Link, agent_command, encode_output, source_command

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

USER = "user"
"""Whom the model's code runs as; E2B's templates have one of that name."""
_COMMAND = f"{agent_command(USER)} | {source_command(encode_output)}"


class E2BLink(Link):
    """A link to a microVM of E2B."""

    def __init__(self, machine: AsyncSandbox) -> None:
        super().__init__("E2B")
        self.machine = machine
        self._command: AsyncCommandHandle[None] | None = None

    async def _start(self) -> None:
        self._command = await self.machine.commands.run(
            _COMMAND,
            background=True,
            stdin=True,
            user="root",
            timeout=0,  # as long as the sandbox
            on_stdout=self._receive_text,
            retain_output=False,
        )

    async def _write(self, data: bytes) -> None:
        assert self._command is not None
        await self.machine.commands.send_stdin(self._command.pid, data)

    async def _wait(self) -> None:
        assert self._command is not None
        await self._command.wait()

    async def _terminate(self) -> None:
        await self.machine.kill()

    async def _runs(self) -> bool:
        return bool(await self.machine.is_running())

    def _tells_of_the_end(self, error: Exception) -> bool:
        from e2b import CommandExitException, NotFoundException

        return isinstance(error, CommandExitException | NotFoundException)
