"""An environment with a sandbox: opened before each episode, on the backend that the config names, closed after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from agent_rl.core.messages import JSON
from agent_rl.gym.env import ToolEnv
from agent_rl.sandboxes.base import Limits, Sandbox
from agent_rl.sandboxes.registry import shared_backend


class HasSandbox(Protocol):
    """What the tools that run code take for `self`: an environment with a sandbox."""

    sandbox: Sandbox


class SandboxedEnv(ToolEnv):
    """A `ToolEnv` whose `reset` calls `await self.open_sandbox()`, and whose tools then work on `self.sandbox`.

    A sandbox that can't be had, or is lost, is an infrastructure failure: the episode fails and is not scored.
    """

    limits: ClassVar[Limits | None] = None
    """What its sandboxes may use; the backend's own limits if None."""
    lifetime: ClassVar[float] = 3600.0
    """Seconds that an episode may hold its sandbox."""

    def __init__(self, sandbox: str = "local", sandbox_args: Mapping[str, JSON] | None = None) -> None:
        """Take note of where the code of the episode will run.

        Args:
            sandbox: the backend: local, docker or e2b.
            sandbox_args: the backend's own options, such as `{"image": "mine:1", "warm": 8}` for docker, or
                `{"interpreter": "jupyter"}` for e2b.

        Raises:
            ConfigError: if there is no such backend, or it does not take these options.
        """
        self._backend = shared_backend(sandbox, sandbox_args or {})
        self._opened: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox.

        Raises:
            RuntimeError: if it is not open.
        """
        if self._opened is None:
            raise RuntimeError(f"{type(self).__name__} has no sandbox open: await self.open_sandbox() in reset")
        return self._opened

    async def open_sandbox(self) -> Sandbox:
        """Open the episode's sandbox.

        Raises:
            SandboxError: if none can be had.
        """
        await self.close()
        self._opened = await self._backend.open(owner=type(self).__name__, limits=self.limits, lifetime=self.lifetime)
        return self._opened

    async def close(self) -> None:
        """Close the sandbox, and with it whatever ran in it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()
