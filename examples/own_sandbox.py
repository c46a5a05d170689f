"""A sandbox backend of your own: plain subprocesses, for code that you trust.

    agent-rl rollout --import examples/own_sandbox.py env=python-v0 env_args.sandbox=subprocess policy=oracle

It starts agent_rl's agent, which does all that the interface asks for over a byte stream; a backend on ssh or
Kubernetes looks the same. Nothing is isolated here, and `capabilities` says so. The agent is not the first process of
a PID namespace, so a command's timeout ends the interpreter, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import agent_rl as ar
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.client import ENTRY, AgentSandbox, AgentSandboxes, greeting

START_TIMEOUT = 30.0


@ar.register_sandbox("subprocess")
class SubprocessSandboxes(AgentSandboxes):
    """Processes of this machine, each in a temporary folder."""

    def __init__(self, python: str = sys.executable) -> None:
        super().__init__()
        self.python = python

    async def claims(self) -> Capabilities:
        """Return that nothing is guaranteed: code is a process like any other."""
        return dict.fromkeys(Guarantee)

    async def spawn(self, owner: str, limits: Limits, lifetime: float) -> AgentSandbox:
        """Start an agent in a new folder; no limit is kept."""
        folder = tempfile.mkdtemp(prefix="own-sandbox-")
        ours, theirs = socket.socketpair()
        with theirs:
            socket_id = theirs.fileno()
            process = subprocess.Popen([self.python, "-c", ENTRY], stdin=socket_id, stdout=socket_id, cwd=folder)

        def kill() -> None:
            """Close nothing: the agent ends everything when its stdin is at its end, which it is by now."""

        async def ended() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, START_TIMEOUT)
            shutil.rmtree(folder, ignore_errors=True)

        sandbox = AgentSandbox(ours, name=owner, kill=kill, ended=ended, expires=time.monotonic() + lifetime)
        async with self.starting(sandbox):
            await asyncio.get_running_loop().sock_sendall(ours, greeting(lifetime, home=folder))
            await sandbox.ready(START_TIMEOUT)
        return sandbox
