"""A container's sandbox, with users beside the first one: each has an agent of its own.

An agent without capabilities can't become another user, and none gets any. So the engine starts one more in the
container, as a user that nothing else on the host is. It is confined as the first, in the same cgroup and namespaces,
and ends what it starts. Code can kill the agent of its own user, which is not the first process of the namespace. That
ends the whole sandbox, by the act of the code: no process that the other agents may not kill outlives it.
"""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from agent_rl.core.sandbox_loss import Cause
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.calls import Command, ExecResult
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.fate import EndedByCodeError
from agent_rl.sandboxes.client.processes import of_process
from agent_rl.sandboxes.client.recorded import RecordedSandbox
from agent_rl.sandboxes.docker.container import MAX_USERS, Demultiplexer
from agent_rl.sandboxes.docker.engine import TIMEOUT
from agent_rl.sandboxes.process import Launch, Process

Join = Callable[[int, Mapping[str, str]], Awaitable[socket.socket]]
"""Starts an agent of the user of that number, from 1 on, with these variables; returns the stream to it."""


class ContainerSandbox(RecordedSandbox):
    """A sandbox in a container.

    Args:
        sock: as `AgentSandbox` has it, and so the rest.
        join: None where there are no other users.
    """

    def __init__(self, sock: socket.socket, *, join: Join | None, **settings: Any) -> None:
        super().__init__(sock, **settings)
        self._join, self._settings = join, settings
        self._users: dict[str, AgentSandbox] = {}

    def refuse_users(self) -> str | None:
        """Return why no call can have another user here."""
        return None if self._join else "other users were tried with the engine's own runtime only; leave runtime= out"

    async def run_command(self, command: Command) -> ExecResult:
        """Run a command to its end; whatever it leaves running in the background is ended, too."""
        if not command.user:
            return await super().run_command(command)
        try:
            with self.journal.unless_cancelled():
                result = await self.fate.attribute(self._run_as(command))
        except EndedByCodeError as end:
            return ExecResult(-signal.SIGKILL, "", f"{end}\n", sandbox_lost=True)
        self.note(command, result)
        return result

    async def start_process(self, launch: Launch) -> Process:
        """Start a process that goes on when this returns."""
        if not launch.user:
            return await super().start_process(launch)
        self.journal.has_processes = True
        agent = await of_process(self.fate.attribute(self._agent_in_turn(launch.user)))
        return await agent.start_process(replace(launch, user=""))

    async def _run_as(self, command: Command) -> ExecResult:
        async with self._turn:
            agent = await self._agent_of(command.user)
            result = await agent.run_command(replace(command, user=""))
        if result.sandbox_lost:
            raise self.fate.error()
        return result

    async def _agent_in_turn(self, user: str) -> AgentSandbox:
        async with self._turn:
            return await self._agent_of(user)

    async def _agent_of(self, user: str) -> AgentSandbox:
        """Return the agent of a user, started if there is none; it has to be one's turn.

        Raises:
            ConfigError: if there are too many.
            SandboxError: if it can't be started: the sandbox is lost.
        """
        self._check_held()
        if user not in self._users:
            if len(self._users) >= MAX_USERS:
                raise ConfigError(f"user={user!r}: a sandbox has at most {MAX_USERS} users beside the first")
            try:
                self._users[user] = await self._start_agent(user)
            except SandboxError as error:
                self._lose(f"no agent of its user {user} could be started: {error}", Cause.AGENT_FAILED)
                raise self.fate.error() from error
        self.fate.has_run_code = True
        return self._users[user]

    async def _start_agent(self, user: str) -> AgentSandbox:
        assert self._join is not None
        home = f"/tmp/home-{secrets.token_hex(8)}"  # nobody can have made it
        stream = await self._join(len(self._users) + 1, {"HOME": home})

        def kill() -> None:
            if not agent.fate.is_closed:
                self._lose(f"the agent of its user {user} was lost: {agent.fate.lost}", agent.fate.seen)

        given = {"name": f"{self.name} {user}", "kill": kill, "decode": Demultiplexer().feed}
        agent = AgentSandbox(stream, **{**self._settings, **given})
        made: dict[str, Any] = {"argv": ["mkdir", "-m", "700", home], "cwd": "/", "timeout": TIMEOUT}
        try:
            await agent.ready(TIMEOUT)
            await agent._request("exec", made, b"", TIMEOUT)
        except BaseException:  # when it is cancelled, the sandbox goes on, and this agent ends with its stream
            agent.let_go()
            raise
        return agent

    def _lose(self, reason: str, seen: Cause = Cause.AGENT_ENDED) -> None:
        """End the sandbox, for all of its users."""
        super()._lose(reason, seen)
        for agent in self._users.values():
            agent.fate.is_closed = self.fate.is_closed
            agent._lose(reason, seen)
