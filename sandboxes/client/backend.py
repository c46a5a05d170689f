"""The base class of backends of agents: it counts sandboxes, tries guarantees and closes what is open."""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager

from agent_rl.concurrency import AsyncOnce
from agent_rl.core.sandbox_loss import HOST_ERRORS, Cause, SandboxLoss
from agent_rl.errors import ConfigError, SandboxError, did_you_mean
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.verification import verify


class AgentSandboxes(ABC):
    """A backend of `AgentSandbox`es.

    Args:
        limits: of a sandbox that is opened without any.
        require: the guarantees that are tried before the first sandbox is opened; without them there is none.

    Raises:
        ConfigError: if there is no such guarantee.
    """

    hint = "use another backend"
    """What to do where a required guarantee is not kept."""

    def __init__(self, limits: Limits | None = None, require: Collection[str] = ()) -> None:
        self.limits = limits or Limits()
        self._require = frozenset(map(_guarantee, require))
        self._open: weakref.WeakSet[AgentSandbox] = weakref.WeakSet()  # an agent ends when its sandbox is collected
        self._required = AsyncOnce(lambda: self._verify(self._require))
        self._verified = AsyncOnce(lambda: self._verify(Guarantee))

    @abstractmethod
    async def claims(self) -> Capabilities:
        """Return by what mechanism each guarantee should be kept."""

    @abstractmethod
    async def spawn(self, owner: str, limits: Limits, lifetime: float) -> AgentSandbox:
        """Open a sandbox: `open` for a backend to implement."""

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> AgentSandbox:
        """Open a sandbox, once the required guarantees were tried."""
        if self._require:
            found = await self._required.get()
            if missing := sorted(guarantee for guarantee in self._require if found[guarantee] is None):
                raise SandboxError(f"the sandboxes can't guarantee {', '.join(missing)} here; {self.hint}")
        try:
            return await self.spawn(owner, limits or self.limits, lifetime)
        except SandboxError as error:
            error.loss = SandboxLoss(Cause.NOT_OPENED, str(error))
            raise
        except OSError as error:
            if error.errno not in HOST_ERRORS:
                raise
            reason = f"the host has too little left to open a sandbox: {error}"
            raise SandboxError(reason, SandboxLoss(Cause.HOST_RESOURCES, reason)) from error

    async def capabilities(self) -> Capabilities:
        """Return what is guaranteed here and now, found by trying."""
        return await self._verified.get()

    async def close(self) -> None:
        """Close every sandbox that is still open."""
        await asyncio.gather(*(sandbox.close() for sandbox in tuple(self._open)), return_exceptions=True)

    @asynccontextmanager
    async def starting(self, sandbox: AgentSandbox) -> AsyncIterator[None]:
        """Count a sandbox as open, and close it if its start fails."""
        self._open.add(sandbox)
        try:
            yield
        except BaseException:
            sandbox.let_go()  # now: the end of the loop may cancel what follows before it has begun
            await asyncio.shield(sandbox.close())
            raise

    async def _verify(self, guarantees: Iterable[Guarantee]) -> Capabilities:
        claims = await self.claims()
        return await verify(self.spawn, {guarantee: claims[guarantee] for guarantee in guarantees})


def _guarantee(name: str) -> Guarantee:
    if name not in list(Guarantee):
        raise ConfigError(f"require: there is no guarantee '{name}'.{did_you_mean(name, Guarantee)}")
    return Guarantee(name)
