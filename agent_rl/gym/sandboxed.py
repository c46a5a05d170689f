"""An environment with a sandbox: opened before each episode, on the backend that the config names, closed after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from agent_rl.core.messages import JSON
from agent_rl.gym.env import ToolEnv
from agent_rl.sandboxes.base import Limits, Sandbox
from agent_rl.sandboxes.registry import shared_backend


class HasSandbox(Protocol):
    """An environment with a sandbox: `self` of the tools that run code."""

    sandbox: Sandbox


class SandboxedEnv(ToolEnv):
    """A `ToolEnv` with a sandbox: `reset` awaits `self.open_sandbox()`, and tools use `self.sandbox`.

    A sandbox that can't be opened is an infrastructure failure: the episode fails and is not scored. One that is lost
    after code ran in it is the code's doing: its calls say so, and the episode is scored.
    """

    limits: ClassVar[Limits | None] = None
    """What its sandboxes may use; the backend's own limits if None."""
    lifetime: ClassVar[float] = 3600.0
    """Seconds that an episode may hold its sandbox."""

    def __init__(self, sandbox: str = "local", sandbox_args: Mapping[str, JSON] | None = None) -> None:
        """Choose the backend.

        Args:
            sandbox: the backend: local, docker, e2b, or one of `@register_sandbox`.
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
